"""Bytes over the step: one band per category, program by program, and the instant at which most is alive. No torch."""

from dataclasses import dataclass
from itertools import accumulate

from packhorse.planning.persistent import Persistent
from packhorse.planning.plan import Plan
from packhorse.report.kinds import KINDS, Stay, stays

PERSISTENT = ("parameters", "master weights", "gradients", "optimizer states", "other persistent")


@dataclass(frozen=True)
class Instant:
    """Where most is alive: program, time, bytes of persistent storage, arena and external tensors together, and the stays of that time."""

    program: str
    time: int
    num_bytes: int
    alive: tuple[Stay, ...]  # largest first


def persistent_bands(persistent: Persistent) -> dict[str, int]:
    """Band of PERSISTENT -> bytes, the same at every time; buffers, metrics, constants and padding are "other persistent"."""
    table = dict.fromkeys(PERSISTENT, 0)
    for kind, num_bytes in persistent.bytes_by_kind().items():
        table[kind if kind in table else "other persistent"] += num_bytes
    return table


def alive_bytes(found: list[Stay], times: int) -> list[int]:
    """Bytes of the stays alive at each of so many times."""
    change = [0] * (times + 1)
    for stay in found:
        change[stay.lower] += stay.size
        change[min(stay.upper, times)] -= stay.size
    return list(accumulate(change))[:times]


def peak_instant(plan: Plan) -> Instant:
    """The first instant of the step at which most is alive.

    Its bytes are at most plan.peak_bytes, which reserves the arena at its height and external tensors at their own peak, gaps included.
    """
    best: tuple[int, str, int, list[Stay]] | None = None
    for name, planned in plan.programs.items():
        found = stays(planned)
        for time, total in enumerate(alive_bytes(found, max(len(planned.graph.nodes), 1))):
            if best is None or total > best[0]:
                best = (total, name, time, found)
    assert best is not None
    total, name, time, found = best
    alive = sorted((stay for stay in found if stay.lower <= time < stay.upper), key=lambda stay: (-stay.size, stay.name))
    return Instant(name, time, total + plan.persistent_bytes, tuple(alive))


def bands_at(instant: Instant, persistent: Persistent) -> dict[str, int]:
    """Band -> bytes at the instant: those of PERSISTENT, then KINDS in the arena, then "external <kind>" for what kernels allocate."""
    table = persistent_bands(persistent) | dict.fromkeys(KINDS, 0) | {f"external {kind}": 0 for kind in KINDS}
    for stay in instant.alive:
        table[band_of(stay)] += stay.size
    return table


def most_of_bands(plan: Plan) -> dict[str, int]:
    """Band -> the most bytes that it has at any time of the step."""
    most = persistent_bands(plan.persistent)
    for planned in plan.programs.values():
        by_band: dict[str, list[Stay]] = {}
        for stay in stays(planned):
            by_band.setdefault(band_of(stay), []).append(stay)
        for band, found in by_band.items():
            most[band] = max(most.get(band, 0), *alive_bytes(found, max(len(planned.graph.nodes), 1)))
    return most


def band_of(stay: Stay) -> str:
    """The band of a tensor: its kind, or "external <kind>"."""
    return stay.kind if stay.offset is not None else f"external {stay.kind}"
