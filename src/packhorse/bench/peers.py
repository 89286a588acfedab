"""`packhorse bench peers`: packhorse at each stage of ZeRO beside what people shard training with in PyTorch, on this machine, over gloo.

One GPT of 33.7 million parameters with the same weights and batches for all, AdamW (fused), gradients clipped at norm 1, one thread a rank. Two
shapes: wide (2 x 256 tokens a rank), where computation is most of a step, and narrow (1 x 128), where communication is. Each run is a job of its own;
runs are interleaved in random order, round by round; figures are medians over rounds, of the worst rank, and the first steps do not count.
CPU: milliseconds of a rank's process in one step. Heap: live bytes of malloc and of large anonymous mappings that were touched (heap_watch.c), over
what there was after importing; the peak over the steps, and idle after a step. RSS: the peak of the resident set over that after importing.

packhorse is held to shares of the best rival of its stage: CPU 0.95 at stage 1, 0.85 at 2 and 3; heap peak 0.85, 0.80 where both recompute; and its
RSS to 1.15 of its own heap peak. DeepSpeed takes part if --deepspeed names the Python of an environment that has it.

--tensor: instead, the matrices of the model are split over the ranks, each of which sees the batches of all, so that losses are those of the other
table. packhorse is held to CPU 0.85 of DTensor's and 0.95 of Megatron-core's, and to a heap peak 0.85 of the leaner one's, each beside those that are
sequence parallel, or recompute, as it does. Megatron-core takes part if --megatron names the Python of an environment that has it.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import packhorse
from packhorse.bench import heap_watch
from packhorse.bench.jobs import JobError, run_job
from packhorse.bench.peer_systems import SYSTEMS, System
from packhorse.bench.peer_tensor import TENSOR_SYSTEMS
from packhorse.bench.step import write_between
from packhorse.device.device import load_device
from packhorse.errors import UserError

BEGIN, END = "<!-- bench peers: begin -->", "<!-- bench peers: end -->"
TENSOR_BEGIN, TENSOR_END = "<!-- bench peers --tensor: begin -->", "<!-- bench peers --tensor: end -->"
MODEL = {"layers": 8, "heads": 8, "width": 512, "vocab": 16384}
# share: of what it takes when everything is kept, the budget of packhorse where it splits matrices in one; narrow, four copies of the parameters are
# 95 % of the step
SHAPES: dict[str, dict[str, Any]] = {"wide": {"seq_len": 256, "batch": 2, "share": "84%"}, "narrow": {"seq_len": 128, "batch": 1, "share": "98%"}}
CPU_BARS = {1: 0.95, 2: 0.85, 3: 0.85}
TENSOR_CPU_BARS = {"": 0.85, "megatron": 0.95}  # beside the rivals of a package
HEAP_BAR, HEAP_BAR_RECOMPUTING, RSS_BAR = 0.85, 0.80, 1.15
LOSS_BOUND = 1e-4
EVERY_SYSTEM = (*SYSTEMS, *TENSOR_SYSTEMS)
SECONDS = 300  # of one run, at most
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """Medians over the runs of one system: seconds, bytes. failure: of its first run that failed; the other figures are of the others."""

    system: str
    shape: str
    ranks: int
    runs: int = 0
    wall: float = 0.0
    cpu: float = 0.0
    heap_peak: float = 0.0
    heap_idle: float = 0.0
    rss_peak: float = 0.0
    losses: tuple[float, ...] = field(default=())
    failure: str = ""


@dataclass(frozen=True)
class Bar:
    """A share that a packhorse row was found to have, and what it is held to. beside: the best rival."""

    row: Row
    what: str
    found: float
    most: float
    beside: str

    @property
    def met(self) -> bool:
        return self.found <= self.most


def bars_of(rows: list[Row]) -> list[Bar]:
    """Everything that packhorse is held to, of rows of one shape and number of ranks."""
    known = {row.system: row for row in rows if row.runs}
    bars = []
    for system in (s for s in EVERY_SYSTEM if s.ours and s.name in known):
        row = known[system.name]
        rivals = [s for s in EVERY_SYSTEM if not s.ours and s.name in known and _like(s) == _like(system)]
        if rivals and (system.stage or system.tensor):
            bars += [Bar(row, "CPU", row.cpu / known[s.name].cpu, most, s.name) for s, most in _cpu_bars(system, rivals, known)]
            heap = min((known[s.name] for s in rivals), key=lambda r: r.heap_peak)
            most = HEAP_BAR_RECOMPUTING if system.recompute and not system.tensor else HEAP_BAR
            bars.append(Bar(row, "heap peak", row.heap_peak / heap.heap_peak, most, heap.system))
        if not system.tensor:
            bars.append(Bar(row, "RSS", row.rss_peak / row.heap_peak, RSS_BAR, "its own heap peak"))
    return bars


def _like(system: System) -> tuple:
    """What is the same of those that are compared."""
    return system.tensor, system.stage, system.sequence, system.recompute


def _cpu_bars(system: System, rivals: list[System], known: dict[str, Row]) -> list[tuple[System, float]]:
    """(rival, share of its CPU time at most): the best of a stage of ZeRO; each one that splits matrices."""
    if system.tensor:
        return [(rival, TENSOR_CPU_BARS[rival.package]) for rival in rivals]
    assert system.stage
    return [(min(rivals, key=lambda s: known[s.name].cpu), CPU_BARS[system.stage])]


def unlike(rows: list[Row]) -> list[Row]:
    """Rows whose losses are not those of most others: they have not trained the same model."""
    together = [row for row in rows if row.runs and (_system(row).stage is not None or _system(row).tensor)]
    middle = [statistics.median(values) for values in zip(*(row.losses for row in together))]
    return [row for row in together if max(abs(a - b) for a, b in zip(row.losses, middle)) > LOSS_BOUND]


def medians(system: System, shape: str, ranks: int, found: list[dict[str, Any]]) -> Row:
    """One row of the results of some runs, in which those that failed are {"failure": why}."""
    failure = next((run["failure"] for run in found if "failure" in run), "")
    ran = [run for run in found if "failure" not in run]
    if not ran:
        return Row(system.name, shape, ranks, failure=failure)
    figures = {key: statistics.median(run[key] for run in ran) for key in ("wall", "cpu", "heap_peak", "heap_idle", "rss_peak")}
    return Row(system.name, shape, ranks, len(ran), **figures, losses=tuple(ran[0]["losses"]), failure=failure)


def render(rows: list[Row]) -> str:
    """A table for each shape and number of ranks, in Markdown."""
    tables: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        tables[row.shape, row.ranks].append(row)
    lines: list[str] = []
    for (shape, ranks), those in tables.items():
        batch, seq_len, tensor = SHAPES[shape]["batch"], SHAPES[shape]["seq_len"], _system(those[0]).tensor
        lines += [
            f"### {shape}: {batch * ranks} x {seq_len} tokens, on each of {ranks} ranks"
            if tensor
            else f"### {shape}: {batch} x {seq_len} tokens a rank, {ranks} ranks",
            "",
            f"| |{'' if tensor else ' stage |'} runs | step ms | CPU ms | heap peak MiB | idle | RSS MiB | last loss |",
            f"|---|{'' if tensor else '---|'}---|---|---|---|---|---|---|",
        ]
        for row in those:
            stage = _system(row).stage
            said = f"| {row.system} |" + ("" if tensor else f" {'' if stage is None else stage} |")
            if row.runs:
                memory = " | ".join(f"{x / MIB:.0f}" for x in (row.heap_peak, row.heap_idle, row.rss_peak))
                said += f" {row.runs} | {row.wall * 1e3:.0f} | {row.cpu * 1e3:.0f} | {memory} | {row.losses[-1]:.5f} |"
            else:
                said += " failed | | | | | | |"
            lines.append(said)
        lines += ["", "| | share | found | at most | of | |", "|---|---|---|---|---|---|"]
        for bar in bars_of(those):
            lines.append(f"| {bar.row.system} | {bar.what} | {bar.found:.3f} | {bar.most:.2f} | {bar.beside} | {'met' if bar.met else 'missed'} |")
        lines.append("")
        lines += [f"- {row.system}: {row.failure}" for row in those if row.failure]
        lines += [f"- {row.system}: its losses are not those of the others" for row in unlike(those)]
    return "\n".join(lines).rstrip()


def _system(row: Row) -> System:
    return next(system for system in EVERY_SYSTEM if system.name == row.system)


def _python(system: System, asked: argparse.Namespace) -> str | None:
    """The interpreter of the environment that has what a system needs; None: this one, or none was named."""
    return getattr(asked, system.package) if system.package else None


def measure(systems: list[System], shape: str, ranks: int, asked: argparse.Namespace, library: Path) -> list[Row]:
    """All rounds of one shape on one number of ranks."""
    found: dict[str, list[dict[str, Any]]] = {system.name: [] for system in systems}
    for number in range(asked.rounds):
        for system in random.Random(number).sample(systems, len(systems)):
            environment = {"LD_PRELOAD": str(library), "PYTHONWARNINGS": "ignore"}
            python = _python(system, asked)
            if system.package:  # another environment, in which packhorse is not installed
                environment |= {"PYTHONPATH": str(Path(packhorse.__file__).parent.parent), "DS_ACCELERATOR": "cpu"}
            try:
                settings = {key: getattr(asked, key) for key in ("warmup", "steps", "budget", "device")}
                run = run_job(
                    "packhorse.bench.peer_job",
                    {"system": system.name, "shape": MODEL | SHAPES[shape], **settings},
                    ranks,
                    seconds=SECONDS,
                    environment=environment,
                    python=python or sys.executable,
                )
            except JobError as error:
                run = {"failure": str(error)}
            found[system.name].append(run)
            if not asked.as_json:
                said = (
                    "failed" if "failure" in run else f"{run['wall'] * 1e3:.0f} ms, CPU {run['cpu'] * 1e3:.0f} ms, {run['heap_peak'] / MIB:.0f} MiB"
                )
                print(f"{shape}, {ranks} ranks, round {number + 1}: {system.name}: {said}", flush=True)
    return [medians(system, shape, ranks, found[system.name]) for system in systems]


def run(arguments: list[str], *, as_json: bool) -> int:
    """The command. Exit code 0 if packhorse meets everything that it is held to, else 1."""
    parser = argparse.ArgumentParser(prog="packhorse bench peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of systems' names; all without any")
    parser.add_argument("--tensor", action="store_true", help="tensor parallelism in place of ZeRO")
    parser.add_argument("--ranks", type=int, nargs="+", help="by default 2 and 4; with --tensor 2")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3, help="steps before those that count")
    parser.add_argument("--budget", default="minimum", help="of packhorse where it recomputes")
    parser.add_argument("--device", metavar="FILE", help="device file by which packhorse plans; the one that comes along without")
    parser.add_argument("--deepspeed", metavar="PYTHON", help="of an environment with torch and deepspeed")
    parser.add_argument("--megatron", metavar="PYTHON", help="of an environment with torch and megatron-core")
    parser.add_argument("--write", type=Path, help="Markdown file whose table is replaced")
    asked = parser.parse_args(arguments, argparse.Namespace(as_json=as_json))
    asked.ranks = asked.ranks or ([2] if asked.tensor else [2, 4])
    if min(asked.rounds, asked.steps) < 1 or asked.warmup < 0 or min(asked.ranks) < 2:
        raise UserError("bench peers: expected 1 or more rounds and steps, and 2 or more ranks")
    there = [s for s in (TENSOR_SYSTEMS if asked.tensor else SYSTEMS) if not s.package or _python(s, asked)]
    systems = [s for s in there if not asked.names or any(name.lower() in s.name.lower() for name in asked.names)]
    if not systems:
        raise UserError(f"bench peers: no system is called {' or '.join(asked.names)}; the systems are {'; '.join(s.name for s in there)}")
    for package in ("deepspeed", "megatron"):
        python = getattr(asked, package)
        if python and not os.access(python, os.X_OK):
            raise UserError(f"bench peers: --{package} {python}: expected the path of a Python interpreter")
    load_device(asked.device)  # before anything is run
    between = (TENSOR_BEGIN, TENSOR_END) if asked.tensor else (BEGIN, END)
    if asked.write:
        write_between(asked.write, *between, None)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        library = heap_watch.build(Path(folder))
        for ranks in asked.ranks:
            for shape in asked.shapes:
                rows += measure(systems, shape, ranks, asked, library)
    tables: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        tables[row.shape, row.ranks].append(row)
    bars = [bar for those in tables.values() for bar in bars_of(those)]
    print(json.dumps({"rows": [asdict(r) for r in rows], "bars": [asdict(b) | {"met": b.met} for b in bars]}) if as_json else "\n" + render(rows))
    if asked.write:
        write_between(asked.write, *between, render(rows))
    return int(not all(bar.met for bar in bars) or any(row.failure for row in rows) or any(unlike(those) for those in tables.values()))
