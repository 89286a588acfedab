"""Records -> event files that TensorBoard reads, in RUN/tensorboard; needs the package tensorboard.

Written without the package's own writer thread, so that a record is in the file before the checkpoint that follows it, and a full disk is
heard of at once. After a resume a new file opens with a session start, at which TensorBoard forgets what earlier files hold from that step on.
"""

import os
import time
from pathlib import Path
from typing import Any

from packhorse.train.metrics import Record, scalars


class TensorBoard:
    """Writes to a new event file in `folder`; the first step to come is `steps_done` + 1. Raises OSError as the file system does."""

    def __init__(self, folder: Path, steps_done: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.found_earlier = folder.is_dir() and any(folder.glob("*tfevents*"))
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files in the order of their names.
        seconds, rest = divmod(time.time_ns(), 10**9)
        path = folder / f"events.out.tfevents.{seconds:010d}.{rest:09d}.{os.getpid()}"
        self._writer = RecordWriter(open(path, "xb"))  # noqa: SIM115
        self._add(Event(file_version="brain.Event:2"))
        self._add(Event(step=steps_done + 1, session_log=SessionLog(status=SessionLog.START)))

    @staticmethod
    def is_installed() -> bool:
        try:
            import tensorboard.summary.writer.record_writer  # noqa: F401
        except ImportError:
            return False
        return True

    def write(self, record: Record) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(record).items()]
        self._add(Event(step=record["step"], summary=Summary(value=values)))

    def close(self, *, failed: bool) -> None:
        self._writer.close()

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())
        self._writer.flush()
