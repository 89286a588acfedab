"""`packhorse reproduce zero`: whole steps of the paper's models on its machine, planned (Rajbhandari et al. 2019, arXiv:1910.02054, figure 8 and the
runs of section 10). Which saved values wait where is left to the search, on the paper's own mesh and stage; nothing is typed in but shapes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from packhorse.device.device import load_device
from packhorse.models.gpt import gpt
from packhorse.models.sizes import PADDED_VOCAB, Size, find_size
from packhorse.reproduce.claims import Claim
from packhorse.reproduce.zero_storage import GIGABYTE, PRECISION, STAGES
from packhorse.search.search import Priced, Within, confirm, priced, usable_bytes
from packhorse.search.short import Short
from packhorse.search.strategy import Strategy

DEVICE = "v100-dgx2"
P_A, P_A_CPU = "shard", "offload"
WORDS = {"keep": "kept whole", P_A: "P_a", P_A_CPU: "P_a+cpu"}


@dataclass(frozen=True)
class Case:
    """A model of the paper on so many GPUs. batches: samples of a dp rank to choose from, in ascending order; the last is the paper's, or more.
    chosen: where saved values wait in the paper's run, of those that fit with one of these batches the fastest; None: the paper has no such run."""

    name: str
    size: Size
    gpus: int
    tp: int
    stage: int
    batches: tuple[int, ...]
    chosen: str | None

    @property
    def where(self) -> str:
        return f"{self.name}, {self.gpus:,} GPUs, tp {self.tp}, {STAGES[self.stage]}"


CASES = (
    # figure 8: 75 layers of 8192 channels, up to 32 samples; and the largest model
    Case("60B", Size(75, 8192, 64, PADDED_VOCAB), 128, 16, 2, (2, 4, 8, 16, 32), P_A),
    Case("170B", find_size("gpt", "zero-170b"), 400, 16, 2, (2, 4, 8, 12), P_A_CPU),
    # figure 2, and figure 4, in which there is no tp to cut saved values over
    Case("100B", find_size("gpt", "zero-100b"), 400, 16, 2, (8, 16, 32), P_A),
    Case("13B", find_size("gpt", "zero-dp-13b"), 128, 1, 2, (1, 2), "keep"),
    # the paper has no configuration of it
    Case("1T", find_size("gpt", "megatron-1t"), 1024, 16, 3, (1, 2, 4), None),
)


@dataclass(frozen=True)
class Steps:
    """What was found of a case. each: where saved values wait -> the fastest batch that fits, or the smallest one and why not. at_last: the same at
    the last batch."""

    case: Case
    each: dict[str, Priced]
    at_last: dict[str, Priced]

    @property
    def best(self) -> str | None:
        """Where they wait in the fastest step that fits."""
        fitting = [where for where, one in self.each.items() if not one.why]
        return max(fitting, key=lambda where: self.each[where].samples_per_s, default=None)


def short_of(size: Size, samples: int) -> Short:
    """A GPT of that size in fp16 with Adam, on the meta device."""
    with torch.device("meta"):
        model = gpt(size).train()
        ids = torch.zeros(samples, size.seq_len, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-4, fused=True)
    device = load_device(DEVICE)
    return Short(model, {"ids": ids, "labels": ids.clone()}, optimizer, None, PRECISION, 1.0, device, host_budget=device.host_memory_bytes)


def found_of(case: Case) -> Steps:
    """Every way to wait, with the batch that suits it."""
    short = short_of(case.size, case.batches[-1])
    usable = usable_bytes(short.device)
    within = Within(case.gpus, tuple((samples, 1) for samples in case.batches), usable, case.tp, case.stage, processes=1)
    ways = [way for way in WORDS if case.tp > 1 or way != P_A]
    asked = [Strategy(case.gpus // case.tp, case.tp, case.stage, case.batches[-1], "blocks", way) for way in ways]
    confirmed = cache(lambda strategy: confirm(short, strategy, usable))
    each = {one.strategy.residency: confirmed(one.strategy) for one in priced(short, within, asked)}
    at_last = {one.residency: confirmed(one) for one in asked}
    return Steps(case, each, at_last)


def steps() -> Iterator[Steps]:
    """Every case."""
    return (found_of(case) for case in CASES)


def claims(found: list[Steps]) -> Iterator[Claim]:
    """What the paper says of them."""
    for one in found:
        case = one.case
        if case.chosen is None:
            yield Claim(f"{case.where}: a step", "fits", "none fits" if one.best is None else _said(one.each[one.best]), one.best is not None)
            continue
        best = "none fits" if one.best is None else f"{WORDS[one.best]}, {_said(one.each[one.best])}"
        yield Claim(f"{case.where}: the fastest", WORDS[case.chosen], best, one.best == case.chosen)
    by_name = {one.case.name: one for one in found}
    if "60B" in by_name:
        alone, forced = (by_name["60B"].each[way] for way in (P_A, P_A_CPU))
        text = f"{forced.samples_per_s / alone.samples_per_s:.3f} of the speed of P_a"
        yield Claim("60B: P_a+cpu forced", "slower (C5 below C4)", text, forced.samples_per_s < alone.samples_per_s)
    if "170B" in by_name:
        last = by_name["170B"].at_last
        fits = [WORDS[way] for way, one in last.items() if not one.why]
        samples = last[P_A].strategy.samples
        text = f"{', '.join(fits) or 'nothing'} ({', '.join(f'{WORDS[way]} {_gigabytes(one)}' for way, one in last.items())})"
        yield Claim(f"170B: what runs at batch {samples}", "P_a+cpu alone", text, fits == [WORDS[P_A_CPU]])


def table(found: list[Steps]) -> str:
    """A line for each way to wait, with the batch that suits it."""
    device = load_device(DEVICE)
    lines = [
        f"Every block computed again; {usable_bytes(device) / GIGABYTE:.1f} GB usable of {DEVICE}. "
        "With the fastest batch that fits, of those listed:",
        "",
        "| model | GPUs | batches | saved values | batch | peak GB | of it model states | on the host | s a step | samples/s | TFLOPs a GPU |",
        "|---" * 11 + "|",
    ]
    for one in found:
        for way, step in one.each.items():
            needs, case = step.needs, one.case
            assert needs is not None
            figures = f"{needs.seconds:.2f} | {step.samples_per_s:.2f} | {needs.flops / needs.seconds / 1e12:.1f}" if not step.why else " | | "
            batch = f"{step.strategy.samples}{' does not fit' if step.why else ''}"
            states, host = needs.persistent / GIGABYTE, needs.host / GIGABYTE
            head = f"| {case.name} | {case.gpus} | {', '.join(map(str, case.batches))} | {WORDS[way]} | {batch}"
            lines.append(f"{head} | {_gigabytes(step)} | {states:.2f} | {host:.2f} | {figures} |")
    return "\n".join(lines)


def _said(one: Priced) -> str:
    return f"batch {one.strategy.samples}: {_gigabytes(one)} GB"


def _gigabytes(one: Priced) -> str:
    assert one.needs is not None
    return f"{one.needs.peak / GIGABYTE:.2f}"


def figures(found: list[Steps]) -> list[dict]:
    """JSON-able values."""
    return [
        {"case": one.case.where, "residency": way, "samples": step.strategy.samples, "why": step.why, **step.needs.__dict__}
        for one in found
        for way, step in one.each.items()
        if step.needs is not None
    ]
