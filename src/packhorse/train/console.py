"""What a run says: one calm line at each log step, in colour on a terminal, plain elsewhere, JSON when asked."""

import json
import sys
from typing import TextIO

from rich.console import Console as RichConsole
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

    @property
    def width(self) -> int:
        """Columns of the terminal, or rich's guess where there is none."""
        return self._rich.width

    def say(self, text: str) -> None:
        """A line or a block of text, as it is."""
        self._rich.print(Text.from_ansi(text))

    def fields(self, pairs: Fields) -> None:
        """One line of names and values; the names are dim on a terminal."""
        line = Text()
        for place, (name, value) in enumerate(pairs):
            line.append("  " if place else "")
            line.append(f"{name} ", style="dim").append(value)
        self._rich.print(line)

    def record(self, record: Record) -> None:
        """A record of metrics.jsonl, for a program that reads along; says nothing otherwise."""
        if self._as_json:
            print(json.dumps(record), file=self._stream, flush=True)


def step_fields(record: Record, *, steps: int, eta_s: float | None) -> Fields:
    """The log line of a step: step/total, loss, gradient norm (-> after clipping), lr, tokens/s, MFU, memory, ETA."""
    tokens_per_s, mfu, memory = record["tokens_per_s"], record["mfu"], record["memory_bytes"]
    return [
        ("step", f"{record['step']:>{len(str(steps))}}/{steps}"),
        ("loss", f"{record['loss']:.4f}"),
        ("grad", _norms(record["grad_norm"], record["clipped_norm"]).ljust(12)),
        ("lr", f"{record['lr']:.2e}"),
        ("tokens/s", "-".rjust(7) if tokens_per_s is None else f"{tokens_per_s:7.0f}"),
        ("MFU", "N/A" if mfu is None else f"{mfu:.1%}"),
        ("memory", "-" if memory is None else f"{memory / 2**30:.3f} GiB"),
        ("ETA", "-" if eta_s is None else format_seconds(eta_s)),
    ]


def _norms(norm: float | None, clipped: float | None) -> str:
    if norm is None or clipped is None:
        return "-"
    return f"{norm:.3f}->{clipped:.3f}" if clipped < norm else f"{norm:.3f}"


def eval_fields(record: Record, *, steps: int) -> Fields:
    """The line of an evaluation."""
    return [("step", f"{record['step']:>{len(str(steps))}}/{steps}"), ("validation loss", f"{record['loss']:.4f} nats/byte")]
