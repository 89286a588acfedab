"""What a run says: one calm line at each log step, in colour on a terminal, plain elsewhere, JSON when asked."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from packhorse.train.metrics import Record
from packhorse.units import format_seconds

Fields = list[tuple[str, str]]


class Console:
    """Text goes to `stream`. With `as_json` the records go there instead, and the text to stderr, so that nothing is lost."""

    def __init__(self, stream: TextIO, *, as_json: bool = False) -> None:
        self._as_json = as_json
        self._stream = stream
        self._rich = RichConsole(file=sys.stderr if as_json else stream, highlight=False, soft_wrap=True)

    @classmethod
    def silent(cls) -> Self:
        """Of a rank that has nothing to say: rank 0 speaks for all."""
        return cls(open(os.devnull, "w", encoding="utf-8"))

    @property
    def width(self) -> int:
        """Columns of the terminal, or rich's guess where there is none."""
        return self._rich.width

    def say(self, text: str) -> None:
        """A line or a block of text, as it is."""
        self._rich.print(Text.from_ansi(text))

    def fields(self, pairs: Fields) -> None:
        """One line of names and values; the names are dim on a terminal. One that is too narrow goes without the last of them."""
        line = Text()
        for place, (name, value) in enumerate(pairs):
            more = Text.assemble("  " if place else "", (f"{name} ", "dim"), value)
            if place and self._rich.is_terminal and line.cell_len + len(more.plain.rstrip()) > self.width:
                break
            line.append_text(more)
        self._rich.print(line)

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """Inside, calling the value with a number of bytes moves a bar of `total` bytes forward; on a terminal only, and gone at the end."""
        columns = (TextColumn(title), BarColumn(), TaskProgressColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._rich, transient=True, disable=not self._rich.is_terminal) as bar:
            task = bar.add_task(title, total=total)
            yield lambda num_bytes: bar.advance(task, num_bytes)

    def record(self, record: Record) -> None:
        """A record of metrics.jsonl, for a program that reads along; says nothing otherwise."""
        if self._as_json:
            print(json.dumps(record), file=self._stream, flush=True)


def step_fields(record: Record, *, steps: int, eta_s: float | None) -> Fields:
    """The log line of a step: step/total, loss, gradient norm (-> after clipping), lr, tokens/s, ETA, memory, MFU where it is known.

    In the order of what a reader misses first: memory has a line of its own at the start. All up to the ETA fits into 80 columns.
    """
    tokens_per_s, mfu, memory = record["tokens_per_s"], record["mfu"], record["memory_bytes"]
    fields = [
        ("step", f"{record['step']:>{len(str(steps))}}/{steps}"),
        ("loss", f"{record['loss']:.4f}"),
        ("grad", _norms(record["grad_norm"], record["clipped_norm"]).ljust(9)),
        ("lr", f"{record['lr']:.1e}".replace("e-0", "e-")),
        ("tok/s", "-".rjust(5) if tokens_per_s is None else f"{tokens_per_s:5.0f}"),
        ("ETA", ("-" if eta_s is None else format_seconds(eta_s)).rjust(5)),
    ]
    if memory is not None:
        fields.append(("memory", f"{memory / 2**30:.3f} GiB"))
    if mfu is not None:
        fields.append(("MFU", f"{mfu:.1%}"))
    return fields


def _norms(norm: float | None, clipped: float | None) -> str:
    if norm is None or clipped is None:
        return "-"
    return f"{norm:.3g}->{clipped:.3g}" if clipped < norm else f"{norm:.3g}"


def eval_fields(record: Record, *, steps: int) -> Fields:
    """The line of an evaluation."""
    return [("step", f"{record['step']:>{len(str(steps))}}/{steps}"), ("validation loss", f"{record['loss']:.4f} nats/{record['unit']}")]
