"""What `packhorse bench equality` compares: how each small model is trained. A case is one model, trained in one way on one mesh of ranks."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from packhorse.bench.equality_models import CUT_WORKLOADS, EVERY_WORKLOAD, WORDY, WORKLOADS, Batch, Workload
from packhorse.mesh import Mesh

SAMPLES = 2  # of each micro-batch of a dp rank
STEPS, MANY_STEPS = 3, 10


@dataclass(frozen=True)
class Case:
    """One way to train one model for some steps. recompute: optimal, within `budget`. dtype: of everything. sequence: sequence parallelism. on_host:
    optimizer states lie on the host, which updates."""

    model: str
    dp: int
    stage: int
    micros: int
    clip: bool
    recompute: bool
    dtype: str = "float64"
    tp: int = 1
    sequence: bool = False
    steps: int = STEPS
    layers: int = 2
    on_host: bool = False

    @property
    def mesh(self) -> Mesh:
        return Mesh(dp=self.dp, tp=self.tp)

    @property
    def budget(self) -> str | None:
        """No share of the peak suits all models: of some the logits take the most by far, of others the states."""
        return "minimum" if self.recompute else None


FACTORS: dict[str, tuple[Any, ...]] = {
    "model": tuple(WORKLOADS),
    "dp": (1, 2, 3, 4),
    "stage": (0, 1, 2, 3),
    "micros": (1, 3),
    "clip": (False, True),
    "recompute": (False, True),
}
WAYS: dict[str, dict[str, bool]] = {
    "plain": {"recompute": False},
    "recompute": {"recompute": True},
    "sequence": {"recompute": False, "sequence": True},
}
MESH_FACTORS: dict[str, tuple[Any, ...]] = {
    "model": tuple(CUT_WORKLOADS),
    "tp": (1, 2, 4),
    "way": tuple(WAYS),
    "dp": (1, 2),
    "stage": (0, 1, 2, 3),
    "micros": (1, 2),
    "clip": (False, True),
}
# what is trained for MANY_STEPS
LONG = (
    {"model": "GPT, 4 heads", "tp": 2, "dp": 1, "stage": 0, "recompute": False, "sequence": False},
    {"model": "Llama, 4 heads, untied", "tp": 2, "dp": 2, "stage": 3, "recompute": False, "sequence": True},
)


def every_case(dtype: str = "float64") -> list[Case]:
    """The full matrix over dp."""
    return [Case(**dict(zip(FACTORS, values)), dtype=dtype) for values in itertools.product(*FACTORS.values())]


def every_mesh_case() -> list[Case]:
    """The full matrix over tp and dp: a model on a mesh, at every stage, plain, recomputing and with its sequences split, as far as there is a
    difference. Micro-batches and clipping alternate from one mesh, way and model to the next; the stages of one have the same. And a large
    vocabulary."""
    found = []
    for (place, model), (nth, (tp, way, dp)) in itertools.product(
        enumerate(MESH_FACTORS["model"]), enumerate(itertools.product(*(MESH_FACTORS[name] for name in ("tp", "way", "dp"))))
    ):
        for stage in MESH_FACTORS["stage"][: None if dp > 1 else 1]:
            if tp > 1 or way != "sequence":
                alternating: dict[str, Any] = {"micros": 1 + (nth + place) % 2, "clip": bool((nth // 2 + place // 2) % 2)}
                found.append(Case(model=model, tp=tp, dp=dp, stage=stage, **(alternating | WAYS[way])))
    found = [replace(case, steps=MANY_STEPS) if any(_is(case, fields) for fields in LONG) else case for case in found]
    return found + [Case(WORDY, 1, 0, 1, True, False, tp=tp, layers=1) for tp in MESH_FACTORS["tp"]]


def _is(case: Case, fields: dict[str, Any]) -> bool:
    return all(getattr(case, name) == value for name, value in fields.items())


def start(case: Case) -> tuple[nn.Module, Workload]:
    """The model with its starting weights: large enough that every gradient counts."""
    torch.manual_seed(3)
    workload = EVERY_WORKLOAD[case.model]
    model = workload.make(case.layers).to(getattr(torch, case.dtype)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model, workload


def micro_batches(case: Case, step: int) -> list[list[Batch]]:
    """[dp rank][micro-batch] of a step. All tp ranks of a dp rank have the same."""
    workload = EVERY_WORKLOAD[case.model]
    draw = torch.Generator().manual_seed(100 + step)
    parts = [[workload.batch(SAMPLES, draw) for _ in range(case.micros)] for _ in range(case.dp)]
    dtype = getattr(torch, case.dtype)
    return [[{k: t.to(dtype) if t.is_floating_point() else t for k, t in micro.items()} for micro in micros] for micros in parts]


def whole_batch(case: Case, step: int) -> Batch:
    """All of a step's micro-batches of all ranks as one batch."""
    parts = [micro for micros in micro_batches(case, step) for micro in micros]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
