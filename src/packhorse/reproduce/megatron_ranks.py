"""`packhorse reproduce megatron`: jobs of 1, 2 and 4 tp ranks on this machine over gloo. Their losses side by side, and how their time goes with the
number of ranks (Shoeybi et al. 2019, arXiv:1909.08053: table 1 with figure 5, and table 8).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from packhorse.bench.jobs import run_job
from packhorse.reproduce.claims import Claim
from packhorse.reproduce.megatron_job import Ran

JOB, SECONDS = "packhorse.reproduce.megatron_job", 900
VOCAB = 256  # bytes
CURVE: dict[str, Any] = {"shape": {"layers": 4, "width": 64, "heads": 4, "seq_len": 64}, "vocab": VOCAB, "batch": 8, "lr": 3e-3, "warmup": 0}
NOISE = 10.0  # times the difference that one other order of sums makes on one rank

# Table 1 of the paper grows the model with the ranks, parameters of the blocks by 2.11 and 3.60 times; here by 1.95 and 3.38. 32 channels a head.
WEAK = {1: (4, 256, 8), 2: (5, 320, 10), 4: (6, 384, 12)}
SEQ_LEN, TIMED_VOCAB, SAMPLES, TIMED_WARMUP = 128, 2048, 8, 2
PAPER_WEAK = {1: 1.00, 2: 0.95, 4: 0.82}  # figure 5: flops of a device and second, over those of one alone
PAPER_STRONG = {1: 1.00, 2: 1.64, 4: 2.34}  # table 8: 1.2 billion parameters, batch 8


@dataclass(frozen=True)
class Job:
    """A job and what became of it."""

    ranks: int
    micro_batches: int
    ran: Ran


def run(asked: dict[str, Any], ranks: int, micro_batches: int = 1) -> Job:
    """Raises JobError if it fails."""
    return Job(ranks, micro_batches, Ran(**run_job(JOB, asked | {"micro_batches": micro_batches}, ranks, seconds=SECONDS)))


# -- the same training run ---------------------------------------------------------------------------------------------------------------


def curves(degrees: tuple[int, ...], steps: int) -> Iterator[Job]:
    """One rank; one rank that adds up its sums in another order, as two micro-batches; several."""
    asked = CURVE | {"steps": steps}
    yield run(asked, 1)
    yield run(asked, 1, 2)
    yield from (run(asked, ranks) for ranks in degrees if ranks > 1)


def apart(job: Job, alone: Job) -> float:
    """The largest difference of the losses of a step, in nats."""
    return max(abs(a - b) for a, b in zip(job.ran.losses, alone.ran.losses, strict=True))


def claims_of_curves(jobs: list[Job]) -> Iterator[Claim]:
    """That tp changes nothing but the order of sums."""
    alone, other = jobs[:2]
    noise = apart(other, alone)
    same = sum(job.ran.start == alone.ran.start for job in jobs)
    yield Claim("weights before the first step", "do not depend on tp (our aim)", f"the same bits in {same} of {len(jobs)} jobs", same == len(jobs))
    for job in jobs[2:]:
        text = f"{apart(job, alone):.1e} nats; one rank with two micro-batches {noise:.1e}"
        steps = len(alone.ran.losses)
        yield Claim(
            f"tp {job.ranks}: losses of {steps} steps, largest difference from tp 1", "float32 noise", text, apart(job, alone) <= NOISE * noise
        )
    exact = sum(job.ran.exact for job in jobs)
    yield Claim("peak and bytes sent as planned, every rank and step", "", f"{exact} of {len(jobs)} jobs", exact == len(jobs))


def table_of_curves(jobs: list[Job]) -> str:
    """A Markdown table of some steps."""
    steps = len(jobs[0].ran.losses)
    shown = sorted({round(part * (steps - 1) / 8) for part in range(9)})
    shape = ", ".join(f"{key} {value}" for key, value in CURVE["shape"].items())
    names = [f"tp {job.ranks}" + (f", {job.micro_batches} micro-batches" if job.micro_batches > 1 else "") for job in jobs]
    rows = [f"| {step + 1} | " + " | ".join(f"{job.ran.losses[step]:.7f}" for job in jobs) + " |" for step in shown]
    head = (
        f"Loss in nats a byte, float32; GPT, {shape}, {CURVE['batch']} samples of the standard library's source, AdamW, learning rate {CURVE['lr']}:"
    )
    return "\n".join([head, "", "| step | " + " | ".join(names) + " |", "|---" * (1 + len(jobs)) + "|", *rows])


# -- scaling -----------------------------------------------------------------------------------------------------------------------------


def scaling(degrees: tuple[int, ...], steps: int) -> dict[str, list[Job]]:
    """Weak: the model grows with the ranks. Strong: the first of them on all. Both begin with one rank."""
    weak, strong = ([run(_timed(WEAK[1], steps), 1)] for _ in range(2))
    for ranks in degrees:
        if ranks > 1:
            weak.append(run(_timed(WEAK[ranks], steps), ranks))
            strong.append(run(_timed(WEAK[1], steps), ranks))
    return {"weak": weak, "strong": strong}


def _timed(shape: tuple[int, int, int], steps: int) -> dict[str, Any]:
    layers, width, heads = shape
    sizes = {"layers": layers, "width": width, "heads": heads, "seq_len": SEQ_LEN}
    return {"shape": sizes, "vocab": TIMED_VOCAB, "batch": SAMPLES, "lr": 1e-4, "warmup": TIMED_WARMUP, "steps": steps}


def weak_efficiency(job: Job, alone: Job) -> tuple[float, float]:
    """Flops of a rank and second over those of one rank alone: by the clock, and by the CPU seconds of all ranks."""
    mine, base = job.ran, alone.ran
    by_clock = (mine.flops / mine.wall_s) / (base.flops / base.wall_s)
    return by_clock, (job.ranks * mine.flops / sum(mine.cpu_s)) / (base.flops / sum(base.cpu_s))


def table_of_scaling(found: dict[str, list[Job]]) -> str:
    """A Markdown table."""
    lines = [
        f"GPTs, batch {SAMPLES} of {SEQ_LEN} tokens, float32, tp ranks over gloo on {os.cpu_count()} cores, one thread a rank. Efficiency: flops of "
        "a rank and second, over those of one rank alone.",
        "",
        "| | tp | million parameters | seconds a step | CPU seconds a rank | CPU seconds of all | sent by a rank | speed-up | paper "
        "| efficiency by the clock | paper | efficiency by CPU seconds |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, jobs in found.items():
        for job in jobs:
            ran, (by_clock, by_cpu) = job.ran, weak_efficiency(job, jobs[0])
            faster = [f"{jobs[0].ran.wall_s / ran.wall_s:.2f}", f"{PAPER_STRONG[job.ranks]:.2f}"] if name == "strong" else ["", ""]
            paper = f"{PAPER_WEAK[job.ranks]:.0%}" if name == "weak" else f"{PAPER_STRONG[job.ranks] / job.ranks:.0%}"
            cells = [
                name,
                job.ranks,
                f"{ran.parameters / 1e6:.1f}",
                f"{ran.wall_s:.2f}",
                f"{sum(ran.cpu_s) / job.ranks:.2f}",
                f"{sum(ran.cpu_s):.2f}",
                f"{ran.sent:,}",
            ]
            cells += [*faster, f"{by_clock:.0%}", paper, f"{by_cpu:.0%}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def claims_of_scaling(found: dict[str, list[Job]]) -> Iterator[Claim]:
    """Beside the paper's, which had a device for each rank and a fast link between them; nothing is asked of two cores."""
    for job in found["weak"][1:]:
        by_clock, by_cpu = weak_efficiency(job, found["weak"][0])
        yield Claim(
            f"weak scaling, tp {job.ranks}", f"{PAPER_WEAK[job.ranks]:.0%}", f"{by_clock:.0%} by the clock, {by_cpu:.0%} by CPU seconds", None
        )
    for job in found["strong"][1:]:
        ran, base = job.ran, found["strong"][0].ran
        text = f"{base.wall_s / ran.wall_s:.2f} times as fast; {sum(ran.cpu_s) / sum(base.cpu_s):.2f} times the CPU seconds in all"
        yield Claim(f"strong scaling, tp {job.ranks}", f"{PAPER_STRONG[job.ranks]} times as fast", text, None)
    jobs = [job for mine in found.values() for job in mine]
    exact = sum(job.ran.exact for job in jobs)
    yield Claim("peak and bytes sent as planned, every rank and step", "", f"{exact} of {len(jobs)} jobs", exact == len(jobs))
