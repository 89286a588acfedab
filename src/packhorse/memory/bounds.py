"""How many bytes are alive when, and the height that follows: no layout can be lower than the largest live set."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from packhorse.memory.buffers import Buffer
from packhorse.units import align_up


def live_bytes(buffers: Sequence[Buffer], alignment: int = 1) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sweep over the schedule -> (times (T,), bytes (T,)), both int64, times strictly increasing.

    bytes[k] are alive, sizes rounded up to `alignment`, throughout [times[k], times[k + 1]); the last entry is 0, and so is
    everything before times[0]. No buffers: two empty arrays.
    """
    if not buffers:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    sizes = np.array([align_up(b.size, alignment) for b in buffers], np.int64)
    events = np.array([b.lower for b in buffers] + [b.upper for b in buffers], np.int64)
    changes = np.concatenate([sizes, -sizes])
    times, where = np.unique(events, return_inverse=True)
    change = np.zeros(len(times), np.int64)
    np.add.at(change, where, changes)
    return times, np.cumsum(change)


def lower_bound(buffers: Sequence[Buffer], alignment: int = 1) -> int:
    """The most bytes alive at one time, sizes rounded up to `alignment`; 0 without buffers."""
    _, alive = live_bytes(buffers, alignment)
    return int(alive.max(initial=0))
