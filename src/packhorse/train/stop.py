"""SIGTERM or SIGINT -> a wish to stop, which the trainer grants at the next step boundary. A second signal acts at once."""

import os
import signal
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """`with StopSignal() as stop:` notes the first signal in `stop.received` instead of ending the process. says: so on stderr."""

    def __init__(self, says: bool = True) -> None:
        self.received: signal.Signals | None = None
        self._says = says
        self._earlier: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._earlier = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    @property
    def exit_code(self) -> int:
        """What shells and schedulers expect of a process that a signal ended: 128 + its number; 0 without one."""
        return 128 + self.received if self.received else 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()
        if self._says:
            # print() may be interrupted in the middle of itself; a bare write may not.
            os.write(2, f"\n{self.received.name}: stopping at the end of this step; once more stops at once, without saving\n".encode())

    def _restore(self) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
