"""`packhorse bench batch`: within the bytes that eager PyTorch takes at a batch of b, train at 4 b.

Eager's bytes are its whole step's: parameters, gradients, optimizer states and buffers, and the most that the allocator held in a step above
that. packhorse gets a plan of 4 b samples within them, kernel workspaces included. The batch itself counts on neither side. Three steps are run
for real.

Each loss, and parameters, gradients and buffers after the last step, are compared with plain PyTorch's at 4 b, bit for bit; losses with those of
gradient accumulation over 4 micro-batches of b, within `BOUND`. Batch norm normalises by its micro-batch, so accumulation is another
computation there; the same net with group norm in its place has no such difference and is compared.

CPU seconds are the process's own, of a sample in a step with AdamW; ratios are the median over rounds of the ratio inside a round. The
largest multiple of b that fits is looked for by planning alone, on the meta device.
"""

import argparse
import copy
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import packhorse
from packhorse.bench.frontier import Contestant, race
from packhorse.bench.frontier import Row as Named
from packhorse.bench.replan import replanned
from packhorse.bench.step import allocator_peak, write_between
from packhorse.errors import BudgetError, UserError
from packhorse.models.gpt import GPT
from packhorse.models.resnet import resnet
from packhorse.planning.plan import Plan
from packhorse.units import format_bytes

BEGIN, END = "<!-- bench batch: begin -->", "<!-- bench batch: end -->"
TIMES = 4
NUM_STEPS = 3
BOUND = 2.0**-17  # relative, of a loss against accumulation: 64 units of fp32's last place, as sums over samples are taken in another order

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Workload:
    """make() -> a model; batch(n) -> keyword arguments of n samples. b: samples that eager PyTorch takes. sums: its loss is a mean over samples that
    do not see each other, so that accumulation computes the same.
    """

    title: str
    b: int
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    sums: bool = True


def group_norm(model: nn.Module, groups: int = 8) -> nn.Module:
    """The model with group norm in place of each batch norm (Wu and He 2018, arXiv:1803.08494)."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(groups, child.num_features))
    return model


def _ids(n: int) -> Batch:
    return {"ids": torch.randint(0, 512, (n, 128)), "labels": torch.randint(0, 512, (n, 128))}


def _images(n: int) -> Batch:
    return {"images": torch.randn(n, 3, 32, 32), "labels": torch.randint(0, 10, (n,))}


MODELS = {
    "gpt": Workload(
        "GPT, 12 blocks, width 128, 128 tokens, vocabulary 512", 4, lambda: GPT(vocab=512, layers=12, width=128, heads=4, seq_len=128), _ids
    ),
    "resnet": Workload("ResNet-56, 3 x 32 x 32, batch norm", 8, lambda: resnet(56), _images, sums=False),
    "resnet-group-norm": Workload("ResNet-56, 3 x 32 x 32, group norm", 8, lambda: group_norm(resnet(56)), _images),
}


@dataclass(frozen=True)
class Row:
    """One model. All bytes are of whole steps. eager_bytes: of eager at b; eager_wide_bytes: of eager at 4 b; planned_bytes,
    measured_bytes: of packhorse at 4 b, and outside_bytes that its kernels used besides.

    equal: losses, parameters, gradients and buffers are plain PyTorch's at 4 b. apart: the largest relative difference of a loss from
    accumulation's (None: accumulation is another computation). time, accumulated_time: CPU seconds a sample of packhorse at 4 b and of
    accumulation, over eager's at b. extra_flops: of recomputation, over the step's without. multiple: the largest multiple of b that has a plan in
    the same budget.
    """

    name: str
    b: int
    eager_bytes: int
    eager_wide_bytes: int
    planned_bytes: int
    measured_bytes: int
    outside_bytes: int
    equal: bool
    apart: float | None
    time: float
    accumulated_time: float
    extra_flops: float
    multiple: int

    @property
    def good(self) -> bool:
        """Within eager's bytes, measured as predicted, and the losses that they have to be."""
        held = self.measured_bytes + self.outside_bytes <= self.eager_bytes
        return held and self.measured_bytes == self.planned_bytes and self.equal and (self.apart is None or self.apart <= BOUND)


@dataclass(frozen=True)
class _Seen:
    """Losses of the steps; parameters, gradients and buffers after the last."""

    losses: list[float]
    tensors: list[Tensor]

    def same(self, other: "_Seen") -> bool:
        return self.losses == other.losses and all(map(torch.equal, self.tensors, other.tensors))


def _after(model: nn.Module, step: Callable[[], Any], gradients: Callable[[], dict[str, Tensor]]) -> _Seen:
    losses = [float(step()) for _ in range(NUM_STEPS)]
    found = gradients()
    tensors = [t for name, p in model.named_parameters() for t in (p.detach(), found[name])]
    return _Seen(losses, [t.clone() for t in (*tensors, *model.buffers())])


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


@dataclass(frozen=True)
class _Eager:
    """Plain PyTorch on a copy of the model: a step, what the first ones came to, and the whole step's bytes."""

    step: Callable[[], float]
    seen: _Seen
    num_bytes: int


def _eager(model: nn.Module, micro_batches: list[Batch]) -> _Eager:
    mine = copy.deepcopy(model)
    optimizer = _optimizer(mine)

    def step() -> float:
        optimizer.zero_grad(set_to_none=False)
        total = 0.0
        for batch in micro_batches:
            loss = mine(**batch) / len(micro_batches)
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    seen = _after(mine, step, lambda: {name: p.grad for name, p in mine.named_parameters() if p.grad is not None})
    states = [t for state in optimizer.state.values() for t in state.values()]
    held = [*mine.parameters(), *(p.grad for p in mine.parameters()), *states, *mine.buffers()]
    return _Eager(step, seen, sum(t.numel() * t.element_size() for t in held if t is not None) + allocator_peak(step))


@dataclass(frozen=True)
class _Planned:
    """A plan that was run: its step, what the first ones came to, measured bytes and what kernels used besides."""

    plan: Plan
    step: Callable[[], Any]
    seen: _Seen
    measured_bytes: int
    outside_bytes: int


def _planned(model: nn.Module, batch: Batch, none: Plan, budget: int) -> _Planned:
    mine = copy.deepcopy(model)
    plan = replanned(none, mine, _optimizer(mine), "optimal", budget)
    step: Any = packhorse.compile(mine, plan)
    seen = _after(mine, lambda: step(batch), step.grads)
    step(batch, measure_outside=True)
    ledger = step.ledger()
    return _Planned(plan, lambda: step(batch), seen, ledger.measured_peak_bytes, ledger.outside_bytes)


def _within(model: nn.Module, batch: Batch, limit: int) -> tuple[_Planned, int]:
    """A plan that takes no more than `limit` together with what its kernels use besides, which is known only once it has run; and its budget."""
    mine = copy.deepcopy(model)
    none = packhorse.plan(mine, batch, optimizer=_optimizer(mine), recompute="none")
    budget = limit
    while True:
        found = _planned(model, batch, none, budget)
        over = found.measured_bytes + found.outside_bytes - limit
        if over <= 0:
            return found, budget
        budget -= over


def largest_multiple(workload: Workload, budget: int) -> int:
    """The largest k for which k b samples have a plan within the budget: by doubling, then halving what lies between. 0 if b itself has none."""

    def fits(k: int) -> bool:
        with torch.device("meta"):
            model, batch = workload.make().train(), workload.batch(k * workload.b)
        try:
            packhorse.plan(model, batch, optimizer=_optimizer(model), recompute="optimal", budget=budget)
        except BudgetError:
            return False
        return True

    least, most = 0, 1
    while fits(most):
        least, most = most, 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def measure(name: str, workload: Workload, rounds: int) -> Row:
    """The row of one model. Raises BudgetError, with the least that works, if no plan of 4 b samples is within eager's bytes at b."""
    torch.manual_seed(0)
    model, batch = workload.make().train(), workload.batch(TIMES * workload.b)
    parts = [{key: t[i * workload.b : (i + 1) * workload.b] for key, t in batch.items()} for i in range(TIMES)]
    narrow, wide, accumulated = _eager(model, parts[:1]), _eager(model, [batch]), _eager(model, parts)
    ours, budget = _within(model, batch, narrow.num_bytes)
    entered = [Contestant(Named("", label), run) for label, run in (("b", narrow.step), ("accumulated", accumulated.step), ("ours", ours.step))]
    times = race(entered, rounds)
    apart = max(abs(mine / theirs - 1) for mine, theirs in zip(ours.seen.losses, accumulated.seen.losses))
    return Row(
        name,
        workload.b,
        narrow.num_bytes,
        wide.num_bytes,
        ours.plan.peak_bytes,
        ours.measured_bytes,
        ours.outside_bytes,
        wide.seen.same(ours.seen),
        apart if workload.sums else None,
        statistics.median(seconds / TIMES / base for base, seconds in zip(times[0], times[2])),
        statistics.median(seconds / TIMES / base for base, seconds in zip(times[0], times[1])),
        ours.plan.overhead_flops / (ours.plan.flops - ours.plan.overhead_flops),
        largest_multiple(workload, budget),
    )


def render(rows: list[Row], rounds: int) -> str:
    """The rows as Markdown."""
    header = ["model", "b", "eager at b", f"eager at {TIMES} b", f"packhorse at {TIMES} b: predicted", "measured", "kernel workspaces"]
    header += [f"bit-equal to eager at {TIMES} b", "losses against accumulation", "CPU s a sample / eager's at b", "accumulation's", "extra flops"]
    header += ["largest multiple of b"]
    lines = [
        f"{torch.get_num_threads()} thread(s), AdamW, {NUM_STEPS} steps compared, median of {rounds} interleaved rounds. "
        f"{sum(row.good for row in rows)} of {len(rows)} train at {TIMES} b within eager's bytes at b. "
        f"Losses have to be within {BOUND:.1e} of accumulation's.",
        "",
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
    ]
    for row in rows:
        cells = [MODELS[row.name].title if row.name in MODELS else row.name, str(row.b)]
        sizes = (row.eager_bytes, row.eager_wide_bytes, row.planned_bytes, row.measured_bytes, row.outside_bytes)
        cells += [format_bytes(size) for size in sizes]
        cells += ["yes" if row.equal else "**no**", "another computation" if row.apart is None else f"{row.apart:.1e}"]
        cells += [f"{row.time:.3f}", f"{row.accumulated_time:.3f}", f"{row.extra_flops:.1%}", str(row.multiple)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run(arguments: list[str], *, as_json: bool) -> int:
    """The command. Exit code 0 if every model is within eager's bytes, exact, and has the losses that it must have, else 1."""
    parser = argparse.ArgumentParser(prog="packhorse bench batch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", type=Path, help="Markdown file whose table is replaced")
    asked = parser.parse_args(arguments)
    if asked.rounds < 1 or asked.threads < 1:
        raise UserError(f"bench batch: --rounds {asked.rounds} --threads {asked.threads}: expected 1 or more of each")
    if asked.write:
        write_between(asked.write, BEGIN, END, None)
    torch.set_num_threads(asked.threads)
    rows = [measure(name, MODELS[name], asked.rounds) for name in asked.model]
    text = render(rows, asked.rounds)
    print(json.dumps([asdict(row) for row in rows]) if as_json else text)
    if asked.write:
        write_between(asked.write, BEGIN, END, text)
    return int(not all(row.good for row in rows))
