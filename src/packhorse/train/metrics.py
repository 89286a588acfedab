"""RUN/metrics.jsonl: one JSON object a line, in the order of the steps, each step once however often the run was resumed.

{"kind": "step", "step": 1, "loss": ..., "grad_norm": ..., "clipped_norm": ..., "lr": ..., "step_s": ..., "memory_bytes": ...}
{"kind": "eval", "step": 100, "loss": ..., "num_bytes": ...}
{"kind": "end", "step": 1000, "loss": ..., "counting_nats": {"1": ..., "2": ..., "3": ...}, ...}
"""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from packhorse.errors import UserError

Record = dict[str, Any]


class MetricsFile:
    """Appends records; opening it drops what lies beyond `steps_done`, which a resumed run is going to do again."""

    def __init__(self, path: Path, steps_done: int) -> None:
        self.path = path
        kept = [record for record in read_metrics(path) if record["step"] <= steps_done and record["kind"] != "end"]
        try:
            staging = path.with_name(f".{path.name}-{os.getpid()}")
            staging.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
            staging.replace(path)
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise _cannot_write(path, error) from error

    def append(self, record: Record) -> None:
        """Adds one line. Raises UserError if the disk is full."""
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise _cannot_write(self.path, error) from error

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


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write {path}: {error.strerror}; the checkpoints of this run are unharmed. "
        "Free space on that disk or make the folder writable, then go on with --resume auto"
    )
