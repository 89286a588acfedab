"""RUN/metrics.jsonl: one JSON object a line, in the order of the steps, each step once however often the run was resumed.

{"kind": "step", "step": 1, "loss": ..., "grad_norm": ..., "clipped_norm": ..., "lr": ..., "step_s": ..., "memory_bytes": ...}
    and, where there are any, "host_bytes": of the host's memory, "sent_bytes": to other ranks in a step; all bytes are of rank 0, as last looked at
{"kind": "eval", "step": 100, "loss": ..., "num_tokens": ..., "unit": "byte" or "token"}
{"kind": "end", "step": 1000, "loss": ..., "counting_nats": {"1": ..., "2": ..., "3": ...}, ...}    the last where tokens are bytes
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from packhorse.errors import UserError

Record = dict[str, Any]
PLOTTED = {"step": "train", "eval": "validation"}  # kind -> its name in plots; "end" repeats what stands before it


class MetricsFile:
    """Appends records; opening it drops what lies beyond `steps_done`, which a resumed run is going to do again.

    `listeners` hear each record once it is in the file.
    """

    def __init__(self, path: Path, steps_done: int, listeners: Sequence[Callable[[Record], None]] = ()) -> None:
        self.path = path
        kept = kept_records(path, steps_done)
        self._last = {record["kind"]: record["step"] for record in kept}  # steps of a kind only rise
        self._listeners = listeners
        try:
            staging = path.with_name(f".{path.name}-{os.getpid()}")
            staging.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
            staging.replace(path)
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise _cannot_write(path, error) from error

    def append(self, record: Record) -> None:
        """Adds one line, unless that step has a record of this kind. Raises UserError if the disk is full."""
        if self.holds(record["kind"], record["step"]):
            return
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        self._last[record["kind"]] = record["step"]
        for listener in self._listeners:
            listener(record)

    def holds(self, kind: str, step: int) -> bool:
        """Whether there is a record of this kind at this step or later."""
        return step <= self._last.get(kind, -1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[Record]:
    """The records of a run; none if there is no file. A last line cut short by a kill is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int) and "kind" in record:
            records.append(record)
    return records


def kept_records(path: Path, steps_done: int) -> list[Record]:
    """The records that a run resumed at `steps_done` goes on from."""
    return [record for record in read_metrics(path) if record["step"] <= steps_done and record["kind"] != "end"]


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record whose kind is plotted, under the names that plots group by: "validation/loss"."""
    group = PLOTTED[record["kind"]]
    return {f"{group}/{name}": value for name, value in record.items() if isinstance(value, int | float) and name != "step"}


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write {path}: {error.strerror}; the checkpoints of this run are unharmed. "
        "Free space on that disk or make the folder writable, then go on with --resume auto"
    )
