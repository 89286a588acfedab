"""The memory of a process seen from outside of all that it runs: by a library that is preloaded and counts (heap_watch.c), and by the system.

The count does not depend on how soon an allocator gives pages back, as the resident set size does.
"""

import ctypes
import subprocess
from dataclasses import dataclass
from pathlib import Path

from packhorse.errors import UserError

SOURCE = Path(__file__).with_name("heap_watch.c")


def build(folder: Path) -> Path:
    """Compiles the library into a folder; what LD_PRELOAD is to be set to. Raises UserError without a C compiler."""
    library = folder / "heap_watch.so"
    try:
        subprocess.run(["cc", "-O2", "-fPIC", "-shared", "-o", str(library), str(SOURCE), "-lpthread"], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError("the heap is counted by a small C library, and there is no C compiler `cc` on the path; install one (gcc or clang)") from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"the library that counts the heap ({SOURCE.name}) does not compile here: {error.stderr.strip().splitlines()[0]}") from None
    return library


@dataclass(frozen=True)
class Seen:
    """Bytes over what there was when the watch began. heap_peak, rss_peak: the most since the last reset; heap_idle: now."""

    heap_peak: int
    heap_idle: int
    rss_peak: int


class HeapWatch:
    """Of this process, which was started with the library preloaded. Raises UserError if it was not."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        if not hasattr(library, "heap_watch_now"):
            raise UserError("the heap is not watched in this process: it has to be started with LD_PRELOAD set to what heap_watch.build made")
        self._now, self._most, self._untouched = library.heap_watch_now, library.heap_watch_most, library.heap_watch_untouched
        for function in (self._now, self._most, self._untouched):
            function.restype = ctypes.c_long
        self._again = library.heap_watch_again
        self.heap_before, self.rss_before = self._now() - self._untouched(), _status("VmRSS")

    def reset(self) -> None:
        """Peaks begin anew."""
        self._again()
        Path("/proc/self/clear_refs").write_text("5")  # the system's peak of the resident set

    def seen(self) -> Seen:
        """Mapped bytes that nobody has touched by now are in neither figure."""
        empty = self._untouched() + self.heap_before
        return Seen(self._most() - empty, self._now() - empty, _status("VmHWM") - self.rss_before)


def _status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
