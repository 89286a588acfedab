"""What the reproductions of papers that come in parts have in common: what a part says, and saying it."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from packhorse.bench.step import write_between
from packhorse.reproduce.chen import table_of_claims
from packhorse.reproduce.claims import Claim


@dataclass(frozen=True)
class Found:
    """What a part has to say. figures: JSON-able. pictures: file name -> SVG."""

    claims: list[Claim]
    text: str
    figures: Any
    pictures: dict[str, str] = field(default_factory=dict)


def run_parts(
    names: Sequence[str], make: Callable[[str], Found], markers: Callable[[str], tuple[str, str]], write: Path | None, as_json: bool
) -> int:
    """Makes each part and prints it; with `write` also into that Markdown file, between its markers, and its pictures beside it.

    Exit code 0 if every claim holds, else 1.
    """
    if write:
        for name in names:
            write_between(write, *markers(name), None)  # a file that cannot take the tables is said before the work
    said: dict[str, Found] = {}
    for name in names:
        said[name] = found = make(name)
        text = f"{table_of_claims(found.claims)}\n\n{found.text}"
        if not as_json:
            print(f"{'' if len(said) == 1 else chr(10)}## {name}\n\n{text}", flush=True)
        if write:
            write_between(write, *markers(name), text)
            for file, picture in found.pictures.items():
                (write.parent / file).write_text(picture)
    if as_json:
        print(json.dumps({name: {"claims": [asdict(claim) for claim in found.claims], "figures": found.figures} for name, found in said.items()}))
    return int(any(claim.holds is False for found in said.values() for claim in found.claims))


def told(part: str, found: Iterable[Any], words: Callable[[Any], str]) -> Iterable[Any]:
    """As they come, each said on stderr."""
    for one in found:
        say(f"{part}: {words(one)}")
        yield one


def say(line: str) -> None:
    """On stderr."""
    print(line, file=sys.stderr, flush=True)
