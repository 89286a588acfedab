"""What torch's allocator hands out during a piece of code, watched from outside the plan."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile


class AllocatorWatch:
    """Context: `peak_bytes` is the highest number of bytes that torch's allocator held inside it above what it held at its start."""

    def __init__(self, device: torch.device):
        self.device = device
        self.peak_bytes = 0

    def __enter__(self) -> "AllocatorWatch":
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            with _without_profiler_chatter():
                self._profile.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        if self.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - self._before
            return
        with _without_profiler_chatter():
            self._profile.__exit__(*exception)
        live = 0
        for event in self._profile.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.name() == "[memory]":
                live += event.nbytes()  # type: ignore[union-attr]
                self.peak_bytes = max(self.peak_bytes, live)


@contextmanager
def _without_profiler_chatter() -> Iterator[None]:
    """torch's profiler writes a line to the process's stderr when it starts and when it stops, in the middle of a run's own lines."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
