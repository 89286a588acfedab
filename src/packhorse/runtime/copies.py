"""Copies between the memory of the device and that of the host, beside the computation, at the pace of their link.

On a CPU both are ordinary memory: what a copy takes is then set by the device file (`host_link`), so that a plan which is made for a slow link can be
tried on any machine. The two directions go on at the same time (full duplex); in each one copies run one after another.
"""

import time
from collections.abc import Callable

from torch import Tensor

from packhorse.device.device import Link
from packhorse.runtime.beside import Beside
from packhorse.runtime.transport import memory_order

CHUNK_BYTES = 1 << 20  # copied between two looks at the clock


class CopyEngine:
    """link: the pace that copies keep to on a CPU; None: as fast as they go. copied_bytes: in both directions so far."""

    def __init__(self, link: Link | None = None, look_around: Callable[[], None] = lambda: None):
        self.link = link
        self.out, self.back = Beside("copies to the host", look_around), Beside("copies from the host", look_around)
        self.copied_bytes = 0

    def to_host(self, tag: str, source: Tensor, target: Tensor) -> None:
        """Starts a copy of a dense tensor to the host. tag: its name, for `wait`."""
        self._start(self.out, tag, source, target)

    def from_host(self, tag: str, source: Tensor, target: Tensor) -> None:
        """Starts a copy back."""
        self._start(self.back, tag, source, target)

    def wait(self, tag: str) -> None:
        """Until a copy has ended."""
        (self.out if tag in self.out.started else self.back).wait(tag)

    def drop(self) -> None:
        """Lets what was started and never waited for end, after an error: the memory of those copies is the next run's."""
        self.out.finish()
        self.back.finish()

    def _start(self, direction: Beside, tag: str, source: Tensor, target: Tensor) -> None:
        self.copied_bytes += source.numel() * source.element_size()
        direction.start(tag, self._copy, memory_order(source), memory_order(target))

    def _copy(self, source: Tensor, target: Tensor) -> None:
        if self.link is None or source.device.type != "cpu" or target.device.type != "cpu":
            target.copy_(source)
            return
        begin, step = time.monotonic(), max(1, CHUNK_BYTES // source.element_size())
        for start in range(0, max(source.numel(), 1), step):
            target[start : start + step].copy_(source[start : start + step])
            done = min(start + step, source.numel()) * source.element_size()
            early = begin + self.link.seconds(done) - time.monotonic()
            if early > 0:
                time.sleep(early)
