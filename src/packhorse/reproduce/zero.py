"""`packhorse reproduce zero`: what Rajbhandari et al. 2019 (ZeRO, arXiv:1910.02054) say of memory, checked on plans of one rank of theirs.

  table1         model states on a device, by size, data parallel degree and stage (table 1)
  sizes          how large a model each stage allows (table 2), and which of the paper's models fit by their states
  fragmentation  M_D: the static layout of a step beside a caching allocator that serves the same step
  residual       ZeRO-R: configurations C1 to C5 (table 3), run for real on 4 ranks of this machine; what P_a saves and sends
  all            all of these

Models are on the meta device but for the runs of `residual`: no other process is started and nothing is allocated.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packhorse.bench.step import write_between
from packhorse.reproduce import zero_fragmentation, zero_residual, zero_sizes, zero_table1
from packhorse.reproduce.chen import table_of_claims
from packhorse.reproduce.claims import Claim


@dataclass(frozen=True)
class Found:
    """What a part has to say. figures: JSON-able."""

    claims: list[Claim]
    text: str
    figures: Any


def _table1() -> Found:
    found = list(zero_table1.table1())
    return Found(list(zero_table1.claims(found)), zero_table1.table(found), [asdict(cell) for cell in found])


def _sizes() -> Found:
    table2, runs = zero_sizes.sizes()
    figures = {"table 2": [asdict(cell) for cell in table2], "runs": [asdict(run) for run in runs]}
    return Found(list(zero_sizes.claims(table2, runs)), zero_sizes.table(table2, runs), figures)


def _fragmentation() -> Found:
    found = list(
        _told("fragmentation", zero_fragmentation.fragmentation(), lambda one: f"{one.case.name}: planned in {one.planning_s:.0f} CPU seconds")
    )
    return Found(list(zero_fragmentation.claims(found)), zero_fragmentation.table(found), [asdict(one) for one in found])


def _residual() -> Found:
    found = zero_residual.residual()
    return Found(list(zero_residual.claims(*found)), zero_residual.table(*found), zero_residual.figures(*found))


PARTS: dict[str, Callable[[], Found]] = {"table1": _table1, "sizes": _sizes, "fragmentation": _fragmentation, "residual": _residual}


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
    if given.write:
        for name in names:
            write_between(given.write, *markers(name), None)  # a file that cannot take the tables is said before the work
    said: dict[str, Found] = {}
    for name in names:
        _say(f"{name}: running")
        said[name] = found = PARTS[name]()
        text = f"{table_of_claims(found.claims)}\n\n{found.text}"
        if not as_json:
            print(f"{'' if len(said) == 1 else chr(10)}## {name}\n\n{text}", flush=True)
        if given.write:
            write_between(given.write, *markers(name), text)
    if as_json:
        print(json.dumps({name: {"claims": [asdict(claim) for claim in found.claims], "figures": found.figures} for name, found in said.items()}))
    return int(any(claim.holds is False for found in said.values() for claim in found.claims))


def _told(part: str, found: Iterable[Any], words: Callable[[Any], str]) -> Iterable[Any]:
    """As they come, each said on stderr."""
    for one in found:
        _say(f"{part}: {words(one)}")
        yield one


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
