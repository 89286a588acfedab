"""One rank of a job: steps of packhorse beside plain PyTorch where every rank has the whole model, and sums of gradients go in the order of ranks.

Run by torchrun with a JSON object as its argument: {"out": file of rank 0}. What every case is, the tables at the end say.
"""

import copy
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import packhorse as ph
from packhorse.bench.jobs import end_job
from packhorse.capture.precision import Islands
from test_table import SETTINGS, Net

STEPS = 3
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_SCALE = 1024.0


class Odd(nn.Module):
    """Frozen, unused, tied, 0-dim, and of another dtype than the others: a parameter of each kind. 11 channels, 7 classes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 11)
        self.frozen = nn.Linear(11, 11).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(11, 11) for _ in range(2))
        self.unused = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.wide = nn.Parameter(torch.randn(11, dtype=torch.float64))
        self.head = nn.Linear(11, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x, y):
        h = self.frozen(self.embed(x)) * self.scale
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return F.cross_entropy(self.head(h + self.wide.to(h.dtype)), y)


class Dropped(Odd):
    """Odd with dropout."""

    def forward(self, x, y):
        h = F.dropout(self.frozen(self.embed(x)) * self.scale, 0.3, self.training)
        for block in self.blocks:
            h = h + F.dropout(torch.tanh(block(h)), 0.3, self.training)
        return F.cross_entropy(self.head(h), y)


class Straight(nn.Module):
    """Gradients grow with the input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x, y):
        return F.cross_entropy(self.layer(x), y)


class Normed(nn.Module):
    """Batch norm: running statistics are a rank's own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))

    def forward(self, x, y):
        return F.cross_entropy(self.layers(x), y)


@dataclass(frozen=True)
class Case:
    """make_optimizer(model). overflow: at step 1 the last rank's loss is so large that its gradients are not finite in fp16."""

    model: Callable[[], nn.Module]
    batch: Callable[[int, int], dict]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    stage: int
    precision: str = "fp32"
    grad_dtype: torch.dtype | None = None
    dtype: torch.dtype = torch.float32
    overflow: bool = False


def tokens(step: int, rank: int) -> dict:
    draw = torch.Generator().manual_seed(10 * step + rank)
    return {key: torch.randint(0, 7, (4,), generator=draw) for key in "xy"}


def numbers(step: int, rank: int) -> dict:
    draw = torch.Generator().manual_seed(10 * step + rank)
    return {"x": torch.randn(4, 5, generator=draw), "y": torch.randint(0, 3, (4,), generator=draw)}


def groups(model: nn.Module) -> torch.optim.Optimizer:
    """Several groups with settings of their own; `scale` is in none."""
    blocks, rest = [*model.blocks.parameters()], [model.embed.weight, *model.unused.parameters()]
    settings = [{"params": blocks, "lr": 1e-2, "weight_decay": 0.1}, {"params": rest, "lr": 3e-2, "betas": (0.8, 0.9)}, {"params": [model.wide]}]
    return torch.optim.AdamW(settings, lr=1e-3, weight_decay=0.0)


def adamw(**options) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)


class Replica:
    """Plain PyTorch, in 16 bits by the recipe of capture/precision.py."""

    def __init__(self, case: Case, model: nn.Module, rank: int, num_ranks: int):
        self.case, self.rank, self.num_ranks = case, rank, num_ranks
        self.master, self.half = copy.deepcopy(model), DTYPES.get(case.precision)
        self.narrow = copy.deepcopy(model) if self.half else self.master
        self.optimizer = case.make_optimizer(self.master)
        self.scale = LOSS_SCALE if case.precision == "fp16" else 1.0
        self.grads: dict[str, Tensor] = {}

    def step(self, batch: dict) -> tuple[float, bool]:
        """(loss of this rank, whether the step was taken)."""
        for p, wide in zip(self.narrow.parameters(), self.master.parameters()):
            p.data, p.grad = wide.data.to(self.half) if self.half else wide.data, None
        if self.half:
            with torch.autocast("cpu", self.half, cache_enabled=False), Islands("cpu"):
                value = self.narrow(**batch).float()
        else:
            value = self.narrow(**batch)
        value.backward(torch.tensor(self.scale / self.num_ranks, dtype=value.dtype))
        finite = True
        self.grads = {}
        for (name, wide), p in zip(self.master.named_parameters(), self.narrow.parameters()):
            own, wide.grad = p.grad, None  # p may be wide
            if own is not None:
                total = in_order(own if self.case.grad_dtype is None else own.to(self.case.grad_dtype), self.num_ranks)
                wide.grad = total.to(wide.dtype) / self.scale
                self.grads[name] = total.float() / self.scale if self.case.precision == "fp16" else total
                finite &= bool(torch.isfinite(wide.grad).all())
        if finite:
            self.optimizer.step()
        return value.item(), finite


def in_order(own: Tensor, num_ranks: int) -> Tensor:
    """The sum over ranks, from rank 0 on."""
    every = [torch.empty_like(own) for _ in range(num_ranks)]
    dist.all_gather(every, own.contiguous())
    total = every[0].clone()
    for other in every[1:]:
        total += other
    return total


def run(case: Case) -> dict[str, Any]:
    """What rank 0 finds. grads: whether all have the same bits; loss: the largest relative difference; names: of the state, whether they are the
    model's; apart: the largest difference of a parameter or buffer; ranks: of each, whether measured bytes are the predicted ones, for each step
    whether it was skipped and should have been, and the loss scale and what it should be."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = case.model().to(case.dtype) if case.dtype != torch.float32 else case.model()
    replica = Replica(case, model, rank, num_ranks)

    def batch(step: int) -> dict:
        found = case.batch(step, rank)
        if case.overflow and step == 1 and rank == num_ranks - 1:
            found["x"] = found["x"] * 3e4
        return {k: t.to(case.dtype) if t.is_floating_point() else t for k, t in found.items()}

    plan = ph.plan(
        model, batch(0), optimizer=case.make_optimizer(model), mesh=ph.Mesh(dp=num_ranks), rank=rank, zero_stage=case.stage, recompute="none",
        precision=case.precision, grad_dtype=case.grad_dtype,
    )  # fmt: skip
    step = ph.compile(model, plan)
    if step.loss_scale is not None:
        step.loss_scale.value = LOSS_SCALE
    wanted, found, grads, skipped, exact = [], [], True, [], True
    for number in range(STEPS):
        torch.manual_seed(100 * number + rank)
        value, taken = replica.step(batch(number))
        wanted.append(in_order(torch.tensor(value, dtype=torch.float64), num_ranks).item() / num_ranks)
        if not taken:
            replica.scale /= 2
        torch.manual_seed(100 * number + rank)
        found.append(step(batch(number)).item())
        skipped.append([step.last.skipped, not taken])
        every = step.grads()
        if taken:
            grads &= every.keys() == replica.grads.keys() and all(torch.equal(every[n], replica.grads[n]) for n in every)
        ledger = step.ledger()
        exact &= ledger.measured_peak_bytes == ledger.predicted_peak_bytes
        exact &= ledger.measured_comm_bytes == ledger.predicted_comm_bytes or not taken  # a skipped update gathers nothing
    state = step.state_dict()
    theirs = dict(replica.master.named_parameters(remove_duplicate=False)) | dict(replica.narrow.named_buffers())
    mine = {"exact": exact, "skipped": skipped, "scale": [None if step.loss_scale is None else step.loss_scale.value, replica.scale]}
    rows: list[Any] = [None] * num_ranks
    dist.all_gather_object(rows, mine)
    return {
        "ranks": rows,
        "grads": grads,
        "loss": max(abs(a - b) / abs(b) for a, b in zip(found, wanted)),
        "names": state.keys() == theirs.keys(),
        "apart": max((t.double() - theirs[n].double()).abs().max().item() for n, t in state.items()) if not rank else 0.0,
    }


ODD = {
    **{f"odd, groups, stage {s}": Case(Odd, tokens, groups, s) for s in range(4)},
    "odd, fused, stage 3": Case(Odd, tokens, adamw(fused=True), 3),
    "odd, float64, stage 2": Case(Odd, tokens, groups, 2, dtype=torch.float64),
    **{f"bf16, stage {s}": Case(Odd, tokens, groups, s, "bf16") for s in range(4)},
    "bf16, fp32 gradients, stage 2": Case(Odd, tokens, adamw(), 2, "bf16", torch.float32),
    "bf16, fp32 gradients, stage 3": Case(Odd, tokens, adamw(), 3, "bf16", torch.float32),
    "dropout, stage 1": Case(Dropped, tokens, adamw(), 1),
    "dropout, stage 3": Case(Dropped, tokens, adamw(), 3),
    "batch norm, stage 0": Case(Normed, numbers, adamw(), 0),
    "batch norm, stage 3": Case(Normed, numbers, adamw(), 3),
    **{f"overflow on one rank, stage {s}": Case(Straight, numbers, adamw(), s, "fp16", overflow=True) for s in (0, 1, 2, 3)},
}


def _kind(name: str, stage: int) -> Case:
    """A class of optimizer, with settings."""
    kind, options = SETTINGS[name]
    return Case(Net, numbers, lambda model: kind(model.parameters(), **options), stage)


KINDS = {f"{name}, stage {1 + place % 3}": _kind(name, 1 + place % 3) for place, name in enumerate(SETTINGS)}
CASES = ODD | KINDS


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for name in json.loads(sys.argv[1]).get("names", CASES):
        try:
            found[name] = run(CASES[name])
        except Exception as error:
            found[name] = {"failure": f"{type(error).__name__}: {error}"}
    if not dist.get_rank():
        Path(json.loads(sys.argv[1])["out"]).write_text(json.dumps(found))
    end_job()


if __name__ == "__main__":
    main()
