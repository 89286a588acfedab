"""`packhorse reproduce zero`: M_D of ZeRO-R (Rajbhandari et al. 2019, arXiv:1910.02054, section 6.3) and what it avoids.

A training step mixes what lives long (parameters, saved values, gradients) with what lives short, and an allocator that hands out memory as it is
asked leaves holes between them. The paper moves some of the long-lived tensors into memory set aside beforehand. A static layout gives every tensor
of the step its bytes before the step runs. Here both serve the same steps: the layout of a plan, and PyTorch's caching allocator, simulated
(memory/caching.py). Models are on meta: nothing is allocated.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import packhorse
from packhorse.memory.caching import SEGMENT_ROUND, Failure, simulate, sufficient_capacity
from packhorse.models.gpt import GPT, gpt
from packhorse.models.sizes import Size, find_size
from packhorse.planning.plan import Plan
from packhorse.reproduce.claims import Claim
from packhorse.reproduce.zero_requests import requests_of

SAMPLES, TOKENS, DROPOUT = 8, 1024, 0.1
STEPS = 3  # of one length: states come in the first, the last is as every later one
EVEN = (TOKENS,) * STEPS
UNEVEN = (768, 1024, 512, 896, 1024, 512, 768, 896)  # tokens of step after step
ENDLESS = 2**62
SEEN_FREE = 0.30  # of memory, when the paper saw it run out
NEAR_BOUND = 1.01
WAYS = {False: "all that persists first", True: "as a PyTorch loop"}


@dataclass(frozen=True)
class Case:
    """What is trained and planned how: in step k sequences of lengths[k] tokens; dp, tp, stage of ZeRO: of the rank that is looked at."""

    name: str
    size: Size
    lengths: tuple[int, ...]
    recompute: str
    budget: str | None = None
    dp: int = 1
    tp: int = 1
    stage: int = 0


_355M, _8B = find_size("gpt", "megatron-355m"), find_size("gpt", "zero-8b")
CASES = (
    Case("355M, keeping everything", _355M, EVEN, "none"),
    Case("355M, blocks again", _355M, EVEN, "blocks"),
    Case("355M, optimal in 60 %", _355M, EVEN, "optimal", "60%"),
    Case("355M, keeping everything, uneven lengths", _355M, UNEVEN, "none"),
    Case("355M, blocks again, uneven lengths", _355M, UNEVEN, "blocks"),
    Case("8B, blocks again, tp 4, dp 100, P_os+g", _8B, EVEN, "blocks", dp=100, tp=4, stage=2),
)


@dataclass(frozen=True)
class Served:
    """The caching allocator, asked in one of WAYS. peak_allocated, peak_reserved: bytes with room for all. at_peak: what happens on a device of the
    plan's peak. sufficient: bytes of a device on which it gets through, and below: what happens on one of 2 MiB less."""

    late: bool
    peak_allocated: int
    peak_reserved: int
    at_peak: Failure | None
    sufficient: int
    below: Failure | None


@dataclass(frozen=True)
class Fragmented:
    """One case. persistent_bytes, peak_bytes: of the plans, the largest; bound_bytes: no layout has a lower peak. planning_s: CPU seconds of all of
    them."""

    case: Case
    persistent_bytes: int
    peak_bytes: int
    bound_bytes: int
    planning_s: float
    served: tuple[Served, ...]


def plans_of(case: Case) -> list[Plan]:
    """The plan of each step, on the first rank."""
    with torch.device("meta"):
        model = gpt(case.size, dropout=DROPOUT).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    of_length = {length: _plan(case, model, optimizer, length) for length in sorted(set(case.lengths))}
    return [of_length[length] for length in case.lengths]


def _plan(case: Case, model: GPT, optimizer: torch.optim.Optimizer, length: int) -> Plan:
    ids = torch.zeros(SAMPLES, length, dtype=torch.long, device="meta")
    return packhorse.plan(
        model,
        {"ids": ids, "labels": ids},
        optimizer=optimizer,
        precision="fp16",
        clip_norm=1.0,
        mesh=packhorse.Mesh(dp=case.dp, tp=case.tp),
        rank=0,
        zero_stage=case.stage,
        recompute=case.recompute,
        budget=case.budget,
    )


def measure(case: Case) -> Fragmented:
    """Plans it, and has the allocator serve the same steps."""
    begin = time.process_time()
    plans = plans_of(case)
    seconds = time.process_time() - begin
    planned = [program for plan in plans for program in plan.programs.values()]
    persistent, external = plans[0].persistent_bytes, max(program.external_bytes for program in planned)
    peak = persistent + max(program.arena_bytes for program in planned) + external
    bound = persistent + max(max(0, program.layout.lower_bound - program.floor) for program in planned) + external
    return Fragmented(case, persistent, peak, bound, seconds, tuple(serve(plans, late, peak) for late in WAYS))


def serve(plans: list[Plan], late: bool, peak_bytes: int) -> Served:
    """The caching allocator on the steps of `plans`."""
    requests = requests_of(plans, late)
    free = simulate(requests, ENDLESS)
    enough = sufficient_capacity(requests)
    below = simulate(requests, enough - SEGMENT_ROUND).failure
    return Served(late, free.peak_allocated, free.peak_reserved, simulate(requests, peak_bytes).failure, enough, below)


def fragmentation() -> Iterator[Fragmented]:
    """Of every case."""
    yield from map(measure, CASES)


def claims(found: list[Fragmented]) -> Iterator[Claim]:
    """What the paper says, and what a static layout comes to."""
    for one in found:
        text = f"{one.peak_bytes / one.bound_bytes - 1:.2%} above what no layout can go below"
        yield Claim(f"{one.case.name}: the plan's peak", "", text, one.peak_bytes <= NEAR_BOUND * one.bound_bytes)
    for late, way in WAYS.items():
        served = [(one, s) for one in found for s in one.served if s.late == late]
        failed = [s.at_peak for _, s in served if s.at_peak is not None]
        roomy = sum(failure.free_bytes >= failure.request.num_bytes for failure in failed)
        text = f"{len(failed)} of {len(served)}, {roomy} of them with as many bytes free as were asked for"
        yield Claim(f"caching allocator, {way}: out of memory where the plan fits", "happens (M_D)", text, None if late else roomy > 0)
        over_peak, over_use = [s.sufficient / one.peak_bytes - 1 for one, s in served], [s.sufficient / s.peak_allocated - 1 for _, s in served]
        text = f"{_span(over_peak)} over the plan's peak, {_span(over_use)} over what it has allocated at most"
        yield Claim(f"caching allocator, {way}: memory that it needs", "", text, None)
    free = [_share(f, size) for one in found for s in one.served for f, size in ((s.at_peak, one.peak_bytes), (s.below, s.sufficient)) if f]
    # the paper gives no case, so none can be asked for
    text = f"{min(free):.1%} to {max(free):.1%}, in {sum(share > SEEN_FREE for share in free)} of {len(free)} failures above 30 %"
    yield Claim("memory free when the caching allocator runs out of it", "over 30 % in extreme cases", text, None)


def _span(shares: list[float]) -> str:
    return f"{min(shares):+.1%} to {max(shares):+.1%}"


def _share(failure: Failure, capacity: int) -> float:
    return failure.free_bytes / capacity


def table(found: list[Fragmented]) -> str:
    """Two Markdown tables: what is needed, and how it fails."""
    lines = [
        f"GPTs in fp16, AdamW, dropout {DROPOUT}, vocabulary 51,200. {STEPS} steps of {SAMPLES} sequences of {TOKENS:,} tokens; uneven lengths: "
        f"{len(UNEVEN)} steps of {', '.join(map(str, UNEVEN))} tokens. Bytes of one rank:",
        "",
        "| | persistent | plan's peak | lower bound | planned in | caching allocator, asked | allocated | reserved | gets through with "
        "| over the plan's peak | over allocated |",
        "|---" * 11 + "|",
    ]
    for one in found:
        for s in one.served:
            lines.append(
                f"| {one.case.name} | {one.persistent_bytes:,} | {one.peak_bytes:,} | {one.bound_bytes:,} | {one.planning_s:.0f} s | {WAYS[s.late]} "
                f"| {s.peak_allocated:,} | {s.peak_reserved:,} | {s.sufficient:,} "
                f"| {s.sufficient / one.peak_bytes - 1:+.1%} | {s.sufficient / s.peak_allocated - 1:+.1%} |"
            )
    lines += [
        "",
        "How it fails, on a device of the plan's peak and on one of 2 MiB less than what it gets through with:",
        "",
        "| | asked | device | asked for | free | of it in cached blocks | not in segments | largest block it could have had |",
        "|---" * 8 + "|",
    ]
    for one in found:
        for s in one.served:
            for where, size, failure in (("the plan's peak", one.peak_bytes, s.at_peak), ("2 MiB less", s.sufficient - SEGMENT_ROUND, s.below)):
                lines.append(f"| {one.case.name} | {WAYS[s.late]} | {where}, {size:,} | {_failure(failure, size)} |")
    return "\n".join(lines)


def _failure(failure: Failure | None, size: int) -> str:
    if failure is None:
        return "gets through | | | | "
    asked = failure.request.num_bytes
    return (
        f"{asked:,} ({asked / size:.1%}) | {failure.free_bytes:,} ({_share(failure, size):.1%}) "
        f"| {failure.cached_bytes:,} | {failure.unsegmented_bytes:,} | {failure.largest_cached_bytes:,}"
    )
