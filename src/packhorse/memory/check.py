"""The checker of layouts: slow, obvious, and independent of everything that makes one."""

from collections.abc import Sequence

from packhorse.errors import CheckError
from packhorse.memory.buffers import Buffer, Layout


def check_layout(buffers: Sequence[Buffer], layout: Layout) -> None:
    """Looks at every pair of buffers: O(n**2).

    Raises CheckError if a buffer has no offset, an offset belongs to no buffer or is negative or misaligned, two buffers alive at
    the same time share a byte, the height is not the largest end, or the lower bound is not the largest live set.
    """
    names = [b.name for b in buffers]
    for name in names:
        if name not in layout.offsets:
            raise CheckError(f"buffer {name!r} has no offset")
    for name in layout.offsets:
        if name not in names:
            raise CheckError(f"offset {layout.offsets[name]} is for {name!r}, which is none of the {len(names)} buffers")
    if len(names) != len(layout.offsets):
        raise CheckError(f"{len(names)} buffers share {len(layout.offsets)} names")

    for b in buffers:
        offset = layout.offsets[b.name]
        if offset < 0:
            raise CheckError(f"{_where(b, layout)}: the offset is negative")
        if offset % layout.alignment != 0:
            raise CheckError(f"{_where(b, layout)}: the offset is not a multiple of the alignment, {layout.alignment}")

    for i, a in enumerate(buffers):
        a_begin, a_end = _bytes(a, layout)
        for b in buffers[i + 1 :]:
            b_begin, b_end = _bytes(b, layout)
            same_time = max(a.lower, b.lower) < min(a.upper, b.upper)
            same_byte = max(a_begin, b_begin) < min(a_end, b_end)
            if same_time and same_byte:
                raise CheckError(f"{_where(a, layout)} overlaps {_where(b, layout)} in time and in bytes")

    height = 0
    for b in buffers:
        height = max(height, layout.offsets[b.name] + _rounded(b.size, layout.alignment))
    if layout.height != height:
        raise CheckError(f"the height is given as {layout.height} bytes, but the highest buffer ends at {height}")

    # The live set grows only where a buffer begins, so the largest one is found there.
    bound = 0
    for instant in {b.lower for b in buffers}:
        bound = max(bound, sum(_rounded(b.size, layout.alignment) for b in buffers if b.lower <= instant < b.upper))
    if layout.lower_bound != bound:
        raise CheckError(f"the lower bound is given as {layout.lower_bound} bytes, but the largest live set has {bound}")


def _rounded(size: int, alignment: int) -> int:
    """The room that `size` bytes take up: counts off whole alignments."""
    num_whole, rest = divmod(size, alignment)
    return (num_whole + (rest > 0)) * alignment


def _bytes(b: Buffer, layout: Layout) -> tuple[int, int]:
    return layout.offsets[b.name], layout.offsets[b.name] + b.size


def _where(b: Buffer, layout: Layout) -> str:
    begin, end = _bytes(b, layout)
    return f"buffer {b.name!r} (alive [{b.lower}, {b.upper}), bytes [{begin}, {end}))"
