"""`packhorse bench strategies`: what the search over strategies calls feasible, run for real on 4 ranks of this machine.

A GPT of 9 small blocks on a device with little memory, at three sizes of it. Every mesh of 4 ranks, stage of ZeRO and way to wait that the search
takes to fit, with the batch that it chose, is planned whole with that memory as its budget and run for two steps. Asked is whether measured peaks
keep to the memory, and whether peak, bytes on the host and bytes sent are those of the plan, on every rank in every step. The peak that the search
foretold from plans of 3 and 4 blocks stands beside.
"""

import argparse
import json
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from packhorse.bench.jobs import run_job
from packhorse.bench.step import write_between
from packhorse.bench.strategies_job import CLIP_NORM, SHAPE, Ran, batch_of
from packhorse.capture.flat_storage import Widths
from packhorse.device.device import format_device, load_device
from packhorse.mesh import Mesh
from packhorse.models.gpt import GPT
from packhorse.search.search import Priced, Within, doublings, search
from packhorse.search.short import Short
from packhorse.search.strategy import Strategy

RANKS, SAMPLES = 4, 16
MEMORY = (2_000_000, 2_500_000, 4_000_000)  # bytes of a rank: the whole step of one rank takes about 8,000,000
HOST_BUDGET = 10_000_000
JOB, SECONDS = "packhorse.bench.strategies_job", 1200
BEGIN, END = "<!-- bench strategies: begin -->", "<!-- bench strategies: end -->"


@dataclass(frozen=True)
class Kept:
    """A strategy that the search takes to fit `memory` bytes, the peak that it foretold, and what became of it. is_best: the one that it chose."""

    memory: int
    foretold_bytes: int
    is_best: bool
    ran: Ran

    @property
    def holds(self) -> bool:
        """It ran within the memory, as planned."""
        return not self.ran.failure and self.ran.exact and max(self.ran.measured_bytes, self.ran.peak_bytes) <= self.memory


def short() -> Short:
    """The model, to be planned a few blocks at a time."""
    with torch.device("meta"):
        model = GPT(**SHAPE).train()
    batch = {name: tensor.to("meta") for name, tensor in batch_of(SAMPLES).items()}
    device = replace(load_device("v100-dgx2"), host_memory_bytes=HOST_BUDGET)
    optimizer = torch.optim.AdamW(model.parameters())
    return Short(model, batch, optimizer, None, Widths(None, None, scaled=False), CLIP_NORM, device, host_budget=HOST_BUDGET)


def feasible(model: Short, memory: int) -> tuple[list[Priced], Strategy | None]:
    """All that the search takes to fit, and what it chooses."""
    answer = search(model, Within(RANKS, doublings(SAMPLES), memory, processes=1))
    return list(answer.fitting), None if answer.best is None else answer.best.strategy


def run_all(asked: Sequence[Priced], memory: int, device: Path) -> dict[Strategy, Ran]:
    """Strategy -> what became of it; those of one mesh in one job."""
    jobs: dict[Mesh, list[Strategy]] = defaultdict(list)
    for one in asked:
        jobs[one.strategy.mesh].append(one.strategy)
    found: dict[Strategy, Ran] = {}
    for strategies in jobs.values():
        given = {"strategies": [asdict(s) for s in strategies], "limit": memory, "host_budget": HOST_BUDGET, "device": str(device)}
        for fields in run_job(JOB, given, RANKS, seconds=SECONDS):
            strategy = Strategy(**fields["strategy"])
            found[strategy] = Ran(**fields | {"strategy": strategy})
    return found


def render(found: Sequence[Kept]) -> str:
    """A summary and a table in Markdown: a line for each size of memory, then what did not hold."""
    bad = [one for one in found if not one.holds]
    over = [one for one in found if not one.ran.failure]
    shares = [one.foretold_bytes / one.ran.peak_bytes for one in over] or [0.0]
    lines = [
        f"{len(found) - len(bad)} of {len(found)} strategies ran within their memory on {RANKS} ranks; peak, bytes on the host and bytes sent as "
        f"planned in {sum(one.ran.exact for one in over)} of {len(over)}. Foretold over planned peak: {min(shares):.3f} to {max(shares):.3f}.",
        "",
        "| bytes of a rank | strategies | within | largest measured peak | chosen | its measured peak |",
        "|---" * 6 + "|",
    ]
    for memory in dict.fromkeys(one.memory for one in found):
        mine = [one for one in found if one.memory == memory]
        best = next((one for one in mine if one.is_best), None)
        chosen = "nothing | " if best is None else f"{best.ran.strategy} | {best.ran.measured_bytes:,}"
        most = max(one.ran.measured_bytes for one in mine)
        lines.append(f"| {memory:,} | {len(mine)} | {sum(one.holds for one in mine)} | {most:,} | {chosen} |")
    lines += [""] * bool(bad)
    lines += [f"- {one.memory:,}: {one.ran.strategy}: {one.ran.failure or f'measured {one.ran.measured_bytes:,}'}" for one in bad]
    return "\n".join(lines)


def run(arguments: list[str], *, as_json: bool) -> int:
    """The command. Exit code 0 if every strategy kept to its memory, as planned."""
    parser = argparse.ArgumentParser(prog="packhorse bench strategies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=int, nargs="+", default=list(MEMORY), metavar="BYTES", help="of each rank")
    parser.add_argument("--write", type=Path, help="Markdown file whose table is replaced")
    asked = parser.parse_args(arguments)
    if asked.write:
        write_between(asked.write, BEGIN, END, None)  # a file that cannot take the table is said before the work
    found: list[Kept] = []
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        model = short()
        device = Path(folder) / "device.toml"
        device.write_text(format_device(model.device), encoding="utf-8")
        for memory in asked.memory:
            fitting, best = feasible(model, memory)
            rans = run_all(fitting, memory, device)
            for one in fitting:
                assert one.needs is not None
                found.append(Kept(memory, round(one.needs.peak), one.strategy == best, rans[one.strategy]))
            if not as_json:
                print(f"{memory:,} bytes: {sum(one.holds for one in found if one.memory == memory)} of {len(fitting)}", flush=True)
    text = render(found)
    print(json.dumps({"strategies": [asdict(one) for one in found]}) if as_json else "\n" + text)
    if asked.write:
        write_between(asked.write, BEGIN, END, text)
    return int(not found or not all(one.holds for one in found))
