"""`packhorse reproduce zero`: what Rajbhandari et al. 2019 (ZeRO, arXiv:1910.02054) say of memory, checked on plans of one rank of theirs.

  table1         model states on a device, by size, data parallel degree and stage (table 1)
  sizes          how large a model each stage allows (table 2), and which of the paper's models fit by their states
  fragmentation  M_D: the static layout of a step beside a caching allocator that serves the same step
  steps          whole steps of the paper's models on its GPUs: which fit, and where saved values wait in the fastest (figure 8)
  residual       ZeRO-R: configurations C1 to C5 (table 3), run for real on 4 ranks of this machine; what P_a saves and sends
  all            all of these

Models are on the meta device but for the runs of `residual`: no other process is started and nothing is allocated.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from packhorse.reproduce import zero_fragmentation, zero_residual, zero_sizes, zero_steps, zero_table1
from packhorse.reproduce.parts import Found, run_parts, say, told


def _table1() -> Found:
    found = list(zero_table1.table1())
    return Found(list(zero_table1.claims(found)), zero_table1.table(found), [asdict(cell) for cell in found])


def _sizes() -> Found:
    table2, runs = zero_sizes.sizes()
    figures = {"table 2": [asdict(cell) for cell in table2], "runs": [asdict(run) for run in runs]}
    return Found(list(zero_sizes.claims(table2, runs)), zero_sizes.table(table2, runs), figures)


def _fragmentation() -> Found:
    found = list(
        told("fragmentation", zero_fragmentation.fragmentation(), lambda one: f"{one.case.name}: planned in {one.planning_s:.0f} CPU seconds")
    )
    return Found(list(zero_fragmentation.claims(found)), zero_fragmentation.table(found), [asdict(one) for one in found])


def _steps() -> Found:
    found = list(told("steps", zero_steps.steps(), lambda one: f"{one.case.where}: {one.best or 'none fits'}"))
    return Found(list(zero_steps.claims(found)), zero_steps.table(found), zero_steps.figures(found))


def _residual() -> Found:
    found = zero_residual.residual()
    return Found(list(zero_residual.claims(*found)), zero_residual.table(*found), zero_residual.figures(*found))


PARTS: dict[str, Callable[[], Found]] = {
    "table1": _table1,
    "sizes": _sizes,
    "steps": _steps,
    "fragmentation": _fragmentation,
    "residual": _residual,
}


def markers(part: str) -> tuple[str, str]:
    """The lines of a Markdown file between which a part is written."""
    return f"<!-- reproduce zero {part}: begin -->", f"<!-- reproduce zero {part}: end -->"


def run(arguments: list[str], *, as_json: bool) -> int:
    """The command. Exit code 0 if every claim holds, else 1."""
    parser = argparse.ArgumentParser(prog="packhorse reproduce zero", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("all", *PARTS), default="all", help="a part, or all of them (default)")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="Markdown file whose tables of these parts are replaced")
    given = parser.parse_args(arguments)
    names = list(PARTS) if given.what == "all" else [given.what]

    def make(name: str) -> Found:
        say(f"{name}: running")
        return PARTS[name]()

    return run_parts(names, make, markers, given.write, as_json)
