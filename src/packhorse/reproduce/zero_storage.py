"""Model states of one rank under the stages of ZeRO, off the persistent storage that a plan of it would have. Nothing is allocated.

A GPT is captured once, on the meta device, in fp16 with fp32 master weights and Adam; its storage is made anew for each mesh and stage. The same is
counted from the shapes alone, as the paper counts (section 5: 2 + 2 + K bytes a parameter, K = 12), with this project's padding.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from packhorse.capture.capture import Captured, capture
from packhorse.capture.flat_storage import Widths, flat_storage
from packhorse.capture.tensor_plan import sharding_of
from packhorse.mesh import Mesh
from packhorse.models.gpt import GPT, gpt
from packhorse.models.sizes import Size
from packhorse.parallel.partition import Partition
from packhorse.parallel.units import units_of
from packhorse.planning.persistent import ALIGNMENT
from packhorse.units import align_up

KINDS = ("parameters", "master weights", "gradients", "optimizer states")
PRECISION = Widths(torch.float16, None, scaled=True)
PARAMETER, GRADIENT, OPTIMIZER = 2, 2, 12  # bytes: fp16, fp16; fp32 master weight, momentum and variance
COUNTER = 4  # bytes of the step count that torch.optim keeps for each tensor
STAGES = {0: "baseline", 1: "P_os", 2: "P_os+g", 3: "P_os+g+p"}
GIGABYTE = 10**9  # as the paper counts
DEVICE_BYTES = 32 * 2**30  # of the paper's V100


@dataclass(frozen=True)
class Prepared:
    """A captured GPT of one size. units: parameter -> what ZeRO-3 gathers along with it."""

    size: Size
    model: GPT
    optimizer: torch.optim.Optimizer
    captured: Captured
    units: dict[str, str]

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


def prepared(size: Size) -> Prepared:
    """Captured for a few tokens: how many does not matter to what persists."""
    with torch.device("meta"):
        model = gpt(size).train()
        ids = torch.zeros(1, 16, dtype=torch.long)
    captured = capture(model, {"ids": ids, "labels": ids}, None, compute=PRECISION.compute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Prepared(size, model, optimizer, captured, units_of(captured.micro, [name for name, _ in model.named_parameters()]))


def state_bytes(given: Prepared, dp: int, stage: int, tp: int = 1) -> int:
    """Bytes of the model states of rank 0 of dp x tp ranks: parameters, master weights, gradients, optimizer states, and their padding."""
    mesh = Mesh(dp=dp, tp=tp)
    sharding = sharding_of(given.model, mesh, 0, None, False)
    partition = Partition(stage if dp > 1 else 0, dp, 0, given.units) if mesh.world_size > 1 else None
    runs = flat_storage(given.model, given.optimizer, given.captured, None, PRECISION, partition, sharding)[0].runs
    return sum(run.num_bytes for run in runs if run.kind in KINDS)


def counted_bytes(tensors: Iterable[tuple[str, int]], dp: int, stage: int) -> int:
    """The paper's formula with this project's padding. tensors: (name, elements) of a GPT.

    A tensor takes a multiple of 64 bytes in fp16. With several ranks those of a block, or outside of blocks of a module, are padded together to dp
    equal shares of the same. Step counts are not shared out: 4 bytes a tensor, each block's a multiple of 64.
    """
    line = ALIGNMENT // PARAMETER
    elements: dict[str, int] = {}
    counts: dict[str, int] = {}
    for name, num_elements in tensors:
        unit = "all" if dp == 1 else ".".join(name.split(".")[: 2 if name.startswith("blocks.") else 1])
        elements[unit] = elements.get(unit, 0) + align_up(num_elements, line)
        counts[unit] = counts.get(unit, 0) + 1
    padded = sum(align_up(num_elements, dp * line) for num_elements in elements.values())
    kept = sum(num_bytes * (padded // dp if stage >= since else padded) for num_bytes, since in ((OPTIMIZER, 1), (GRADIENT, 2), (PARAMETER, 3)))
    return kept + sum(align_up(COUNTER * number, ALIGNMENT) for number in counts.values())
