"""`packhorse bench step`: one training step by eager PyTorch, torch.compile and packhorse, interleaved in one run.

Ratios are the median over rounds of the ratio inside a round, so that a machine whose speed drifts does not decide. CPU seconds are the process's
own; page faults are minor faults; the peak of intermediates is what the allocator held above what was there before the step
(torch.profiler's memory events), plus, for packhorse, the arena.
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from packhorse.bench.rivals import compiled, eager, planned, starting_point
from packhorse.errors import UserError
from packhorse.runtime.allocator import AllocatorWatch
from packhorse.units import format_bytes

BEGIN, END = "<!-- bench step: begin -->", "<!-- bench step: end -->"


@dataclass(frozen=True)
class Cost:
    """Of one step: CPU seconds of the process, seconds on the clock, minor page faults."""

    cpu_s: float
    wall_s: float
    faults: int


def cost(step: Callable[[], Any]) -> Cost:
    """Runs one step and takes its cost."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    cpu, wall = time.process_time(), time.perf_counter()
    step()
    return Cost(time.process_time() - cpu, time.perf_counter() - wall, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


def allocator_peak(step: Callable[[], Any]) -> int:
    """Highest bytes that the CPU allocator held during one step above what it held before it."""
    with AllocatorWatch(torch.device("cpu")) as watch:
        step()
    return watch.peak_bytes


# What a profile's operators are counted as, in the order of the table.
CLASSES = {
    "matrix products": ("mm", "addmm", "bmm", "linear"),
    "attention": ("_scaled_dot_product",),
    "layer norm": ("native_layer_norm",),
    "loss": ("_log_softmax", "nll_loss"),
    "activation": ("gelu",),
    "dropout": ("bernoulli", "native_dropout"),
    "optimizer": ("_fused_adam",),
    "embedding": ("embedding", "index_select", "index_add"),
    "sums": ("sum",),
    "add, mul, fill, copy": ("add", "mul", "fill", "copy", "zero", "where", "div"),
}


def where_it_goes(step: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of one step by class of operator; what is in no operator (Python, dispatch, page faults outside) is "rest"."""
    with profile(activities=[ProfilerActivity.CPU]) as run:
        start = time.perf_counter()  # the profiler's clock
        step()
        total = (time.perf_counter() - start) * 1e3
    table = dict.fromkeys(CLASSES, 0.0)
    for event in run.key_averages():
        name = event.key.removeprefix("aten::")
        for label, prefixes in CLASSES.items():
            if event.key.startswith("aten::") and name.rstrip("_").startswith(prefixes):
                table[label] += event.self_cpu_time_total / 1e3
                break
    table["rest"] = total - sum(table.values())
    return table


def measure(shape: dict[str, int], rounds: int, dropout: float, with_compile: bool) -> dict[str, Any]:
    """All figures of the benchmark as JSON-able values."""
    model, batch = starting_point(shape, dropout, seed=0)
    ours, step = planned(model, batch)
    contestants: dict[str, Callable[[], Any]] = {"eager": eager(model, batch)}
    if with_compile:
        contestants["torch.compile"] = compiled(model, batch)
    contestants["packhorse"] = ours
    losses = {name: [float(run()) for _ in range(3)] for name, run in contestants.items()}
    costs: dict[str, list[Cost]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            costs[name].append(cost(run))
    peaks = {name: allocator_peak(run) for name, run in contestants.items()}
    ledger = step.ledger()
    measured = dict(ledger.measured)
    peaks["packhorse"] += measured["arena"]
    rows = {}
    for name, seen in costs.items():
        mine = costs["packhorse"]
        rows[name] = {
            "cpu_s": statistics.median(c.cpu_s for c in seen),
            "wall_s": statistics.median(c.wall_s for c in seen),
            "faults": statistics.median(c.faults for c in seen),
            "peak_bytes": peaks[name],
            "packhorse_cpu_ratio": statistics.median(m.cpu_s / c.cpu_s for m, c in zip(mine, seen)),
            "packhorse_wall_ratio": statistics.median(m.wall_s / c.wall_s for m, c in zip(mine, seen)),
        }
    return {
        "shape": shape,
        "dropout": dropout,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "rows": rows,
        "losses": losses,
        "arena_bytes": measured["arena"],
        "arena_over_eager": measured["arena"] / peaks["eager"],
        "predicted_peak_bytes": ledger.predicted_peak_bytes,
        "measured_peak_bytes": ledger.measured_peak_bytes,
        "where": {name: where_it_goes(run) for name, run in contestants.items() if name != "torch.compile"},
    }


def render(found: dict[str, Any]) -> str:
    """The figures as two Markdown tables."""
    shape = ", ".join(f"{key} {value}" for key, value in found["shape"].items())
    lines = [
        f"GPT, {shape}, dropout {found['dropout']}, {found['threads']} thread(s), median of {found['rounds']} interleaved rounds.",
        "",
        "| | CPU s a step | packhorse / it | seconds a step | packhorse / it | page faults | peak of intermediates | packhorse / it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ours = found["rows"]["packhorse"]["peak_bytes"]
    for name, row in found["rows"].items():
        lines.append(
            f"| {name} | {row['cpu_s']:.3f} | {row['packhorse_cpu_ratio']:.3f} | {row['wall_s']:.3f} | {row['packhorse_wall_ratio']:.3f} "
            f"| {row['faults']:.0f} | {format_bytes(row['peak_bytes'])} | {ours / row['peak_bytes']:.3f} |"
        )
    lines += [
        "",
        f"Arena height over eager's peak of intermediates: {found['arena_over_eager']:.3f}. "
        f"Peak of the whole step: predicted {found['predicted_peak_bytes']} bytes, measured {found['measured_peak_bytes']}.",
        "",
        "| ms of one profiled step | " + " | ".join(found["where"]) + " |",
        "|---|" + "---|" * len(found["where"]),
    ]
    for label in next(iter(found["where"].values())):
        lines.append(f"| {label} | " + " | ".join(f"{table[label]:.1f}" for table in found["where"].values()) + " |")
    return "\n".join(lines)


def write_between(path: Path, begin: str, end: str, text: str | None) -> None:
    """Replaces what stands between two marker lines of a file (None: only looks). Raises UserError if the file or its markers are not there."""
    page = path.read_text() if path.is_file() else ""
    if begin not in page or end not in page:
        raise UserError(f"{path} has no lines {begin!r} and {end!r} to put the table between")
    if text is None:
        return
    head, rest = page.split(begin, 1)
    path.write_text(f"{head}{begin}\n{text}\n{end}{rest.split(end, 1)[1]}")


def run(arguments: list[str], *, as_json: bool) -> int:
    """The command. Exit code 0; the table is printed, and with --write put into a Markdown file between its markers."""
    parser = argparse.ArgumentParser(prog="packhorse bench step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {
        "layers": 8,
        "width": 256,
        "heads": 8,
        "seq-len": 256,
        "vocab": 8192,
        "batch": 4,
        "rounds": 9,
        "threads": 1,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--write", type=Path, help="Markdown file whose table is replaced")
    asked = parser.parse_args(arguments)
    if asked.rounds < 1 or asked.threads < 1:
        raise UserError(f"bench step: --rounds {asked.rounds} --threads {asked.threads}: expected 1 or more of each")
    if asked.write:
        write_between(asked.write, BEGIN, END, None)  # a file that cannot take the table is said before the work
    torch.set_num_threads(asked.threads)
    shape = {key: getattr(asked, key) for key in ("layers", "width", "heads", "seq_len", "vocab", "batch")}
    found = measure(shape, asked.rounds, asked.dropout, not asked.no_compile)
    print(json.dumps(found) if as_json else render(found))
    if asked.write:
        write_between(asked.write, BEGIN, END, render(found))
    return 0
