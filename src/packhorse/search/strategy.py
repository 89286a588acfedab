"""How a job may be laid over ranks, and what a step of it takes. No torch."""

from dataclasses import dataclass

from packhorse.mesh import Mesh


@dataclass(frozen=True, order=True)
class Strategy:
    """dp, tp: the mesh. stage: of ZeRO. samples: of a micro-batch on each dp rank. recompute, residency: as `packhorse.plan` has them."""

    dp: int
    tp: int
    stage: int
    samples: int
    recompute: str
    residency: str
    num_micro_batches: int = 1

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.dp, self.tp)

    def __str__(self) -> str:
        micros = "" if self.num_micro_batches == 1 else f" x {self.num_micro_batches} micro-batches"
        mesh = f"dp {self.dp} x tp {self.tp}, stage {self.stage}"
        return f"{mesh}, {self.samples} samples a rank{micros}, recompute {self.recompute}, saved values: {self.residency}"


@dataclass(frozen=True)
class Needs:
    """Of one step on the rank that was planned: bytes of the device (persistent, arena, external), of the host, sent to others;
    seconds; flops.

    saved_bytes: what of the arena and of external tensors waits for the backward pass.
    """

    persistent: float
    arena: float
    external: float
    host: float
    sent: float
    seconds: float
    flops: float
    saved_bytes: float

    @property
    def peak(self) -> float:
        return self.persistent + self.arena + self.external


FIGURES = tuple(Needs.__dataclass_fields__)
