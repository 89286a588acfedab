"""`packhorse bench by-hand`: the time of a planned step against the same plan by hand, each block in torch.utils.checkpoint. Interleaved in one run.

Both keep what goes from one block to the next, compute the inside of every block again in the backward pass, the last one too, and keep all
that is outside the blocks. Recomputed flops are counted on both sides. By hand is what people write: checkpoint(block, x, use_reentrant=False).

CPU seconds are the process's own, of a whole step (gradients to zero, forward, backward, AdamW); ratios are the median over rounds of the ratio
inside a round. Gradients stay allocated between steps. Losses, parameters, gradients and buffers after three steps are compared with plain PyTorch's.
"""

import argparse
import copy
import json
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import packhorse
from packhorse.bench.chains import WORKLOADS, Chain, Workload, gpt_chain, resnet_chain
from packhorse.bench.frontier import Contestant, flops_of, race
from packhorse.bench.frontier import Row as Named
from packhorse.bench.recompute_rivals import Forward, every, walking
from packhorse.bench.step import allocator_peak, write_between
from packhorse.errors import UserError
from packhorse.planning.plan import Plan, plan_graph
from packhorse.recompute.facts import facts_of
from packhorse.recompute.mirror import order_of, replay
from packhorse.units import format_bytes

BEGIN, END = "<!-- bench by-hand: begin -->", "<!-- bench by-hand: end -->"
MOST = 0.92  # of the time by hand
NUM_STEPS = 3

# The frontier's, where what surrounds a kernel counts, and two in which kernels take nearly all of the time.
MODELS = {
    "gpt-24": WORKLOADS["gpt-24"],
    "gpt-12": WORKLOADS["gpt-12"],
    "gpt-wide": Workload(
        "GPT, 8 blocks, width 256, 8 heads, 4 x 256 tokens, vocabulary 8192",
        lambda: gpt_chain(layers=8, width=256, heads=8, vocab=8192, seq_len=256),
        lambda: {name: torch.randint(0, 8192, (4, 256)) for name in ("inputs", "labels")},
    ),
    "resnet-128": WORKLOADS["resnet-128"],
    "resnet-wide": Workload(
        "conv-bn-relu net of 64 layers, 32 channels at first, 4 x 3 x 128 x 128",
        lambda: resnet_chain(depth=64, width=32),
        lambda: {"inputs": torch.randn(4, 3, 128, 128), "labels": torch.randint(0, 10, (4,))},
    ),
}


@dataclass(frozen=True)
class Row:
    """One model. *_cpu_s: a step's CPU seconds; ratio: ours over by hand. *_bytes: of a step without parameters, gradients and optimizer states;
    ours with what kernels use besides the plan. *_flops: recomputed. equal, hand_equal: against plain PyTorch, "yes", "no" or "buffers
    differ". exact: the whole step's peak was measured as predicted.
    """

    name: str
    eager_cpu_s: float
    hand_cpu_s: float
    ours_cpu_s: float
    ratio: float
    hand_bytes: int
    ours_bytes: int
    hand_flops: int
    ours_flops: int
    equal: str
    hand_equal: str
    exact: bool

    @property
    def good(self) -> bool:
        """Fast enough, exact, and the bits of plain PyTorch (by hand, but for the running statistics that checkpointing counts twice)."""
        return self.ratio <= MOST and self.exact and self.equal == "yes" and self.hand_equal != "no"


def block_by_block(none: Plan) -> Plan:
    """The plan by hand: what goes into a block, and what comes out of the last, is kept; all else in the blocks is recomputed once.

    none: of recompute="none" for a `Chain` whose blocks share no modules, with one micro-batch.
    """
    graph = none.programs["first"].graph
    seconds = [none.device.seconds(node, graph.values) for node in graph.nodes]
    facts = facts_of(graph, none.persistent.places(), seconds, none.options.in_place)
    block = {
        index: node.module.split(".")[1] if node.module.startswith("blocks.") else ""
        for index, node in enumerate(graph.nodes)
        if facts.forward[index] and facts.real[index]
    }
    leaving = {facts.maker[s] for index, name in block.items() for s in facts.reads[index] if block[facts.maker[s]] != name}
    counts = {index: 1 for index, name in block.items() if name and index not in leaving}
    planned = plan_graph(replay(graph, order_of(facts, counts)), none.persistent, none.options)
    return replace(none, programs={**none.programs, "first": planned})


@dataclass(frozen=True)
class _Seen:
    """Losses of the steps; parameters and gradients, and buffers, after the last."""

    losses: list[float]
    tensors: list[Tensor]
    buffers: list[Tensor]

    def verdict(self, other: "_Seen") -> str:
        """Of `other` against this: "yes", "buffers differ" or "no"."""
        if self.losses != other.losses or not all(map(torch.equal, self.tensors, other.tensors)):
            return "no"
        return "yes" if all(map(torch.equal, self.buffers, other.buffers)) else "buffers differ"


def _after(model: Chain, step: Callable[[], Tensor], gradients: Callable[[], dict[str, Tensor]]) -> _Seen:
    torch.manual_seed(1)
    losses = [step().item() for _ in range(NUM_STEPS)]
    found = gradients()
    tensors = [t.clone() for name, p in model.named_parameters() for t in (p.detach(), found[name])]
    return _Seen(losses, tensors, [b.clone() for b in model.buffers()])


def _optimizer(model: Chain) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def _torch(model: Chain, batch: dict[str, Tensor], make: Callable[[Chain], Forward]) -> tuple[Callable[[], Tensor], _Seen]:
    """A step of PyTorch, and what three of them came to."""
    mine = copy.deepcopy(model)
    optimizer, forward = _optimizer(mine), make(mine)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = forward(**batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, _after(mine, step, lambda: {name: p.grad for name, p in mine.named_parameters() if p.grad is not None})


def measure(name: str, workload: Workload, rounds: int) -> Row:
    """The row of one model."""
    torch.manual_seed(0)
    model, batch = workload.make().train(), workload.batch()
    eager, reference = _torch(model, batch, lambda m: m)
    hand, seen = _torch(model, batch, walking(partial(every, size=1)))
    mine = copy.deepcopy(model)
    plan = block_by_block(packhorse.plan(mine, batch, optimizer=_optimizer(mine), recompute="none"))
    step: Any = packhorse.compile(mine, plan)
    ours = _after(mine, lambda: step(batch), step.grads)
    step(batch, measure_outside=True)
    ledger = step.ledger()
    measured = dict(ledger.measured)
    hand_flops = flops_of(hand) - flops_of(eager)
    hand_bytes = allocator_peak(hand)
    entered = [Contestant(Named("", label), run) for label, run in (("eager", eager), ("hand", hand), ("ours", lambda: step(batch)))]
    times = race(entered, rounds)
    medians = [statistics.median(seconds) for seconds in times]
    return Row(
        name=name,
        eager_cpu_s=medians[0],
        hand_cpu_s=medians[1],
        ours_cpu_s=medians[2],
        ratio=statistics.median(ours_s / hand_s for ours_s, hand_s in zip(times[2], times[1])),
        hand_bytes=hand_bytes,
        ours_bytes=measured["arena"] + measured["external"] + ledger.outside_bytes,
        hand_flops=hand_flops,
        ours_flops=plan.overhead_flops,
        equal=reference.verdict(ours),
        hand_equal=reference.verdict(seen),
        exact=ledger.measured_peak_bytes == ledger.predicted_peak_bytes == plan.peak_bytes,
    )


def render(rows: list[Row], rounds: int) -> str:
    """The rows as Markdown."""
    header = ["model", "eager: CPU s a step", "by hand", "packhorse", "packhorse / by hand", "peak of intermediates, by hand", "packhorse"]
    header += ["recomputed Mflop, by hand", "packhorse", "as plain PyTorch, by hand", "packhorse", "exact"]
    lines = [
        f"{torch.get_num_threads()} thread(s), median of {rounds} interleaved rounds. At most {MOST} of the time by hand in "
        f"{sum(row.ratio <= MOST for row in rows)} of {len(rows)}.",
        "",
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
    ]
    for row in rows:
        cells = [MODELS[row.name].title if row.name in MODELS else row.name]
        cells += [f"{s:.3f}" for s in (row.eager_cpu_s, row.hand_cpu_s, row.ours_cpu_s, row.ratio)]
        cells += [format_bytes(row.hand_bytes), format_bytes(row.ours_bytes), f"{row.hand_flops / 1e6:.1f}", f"{row.ours_flops / 1e6:.1f}"]
        cells += [row.hand_equal, row.equal, "yes" if row.exact else "**no**"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run(arguments: list[str], *, as_json: bool) -> int:
    """The command. Exit code 0 if every model is exact, has plain PyTorch's bits and takes at most 0.92 of the time by hand, else 1."""
    parser = argparse.ArgumentParser(prog="packhorse bench by-hand", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", type=Path, help="Markdown file whose table is replaced")
    asked = parser.parse_args(arguments)
    if asked.rounds < 1 or asked.threads < 1:
        raise UserError(f"bench by-hand: --rounds {asked.rounds} --threads {asked.threads}: expected 1 or more of each")
    if asked.write:
        write_between(asked.write, BEGIN, END, None)
    torch.set_num_threads(asked.threads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = [measure(name, MODELS[name], asked.rounds) for name in asked.model]
    text = render(rows, asked.rounds)
    print(json.dumps([asdict(row) for row in rows]) if as_json else text)
    if asked.write:
        write_between(asked.write, BEGIN, END, text)
    return int(not all(row.good for row in rows))
