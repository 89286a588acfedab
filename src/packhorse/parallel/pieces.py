"""Arithmetic of shards: which elements of which tensors a rank owns, and how much is under way at once. No torch.

Tensors lie at element offsets in a run that is cut into shards of equal size. What of them lies in one shard, in ascending order and without the gaps
between them, is that shard's stream: the elements that are sent to its owner.
"""

from collections.abc import Sequence

# Memory of one reduction, whatever the size of the model (C_B of ZeRO-R, section 6.2); gradients are reduced when they are so many bytes.
BUCKET_BYTES = 2 << 20


def own_pieces(offsets: Sequence[int], sizes: Sequence[int], shard: int, rank: int) -> list[tuple[int, int, int]]:
    """(tensor, first element in it, elements) of what lies in the shard of `rank`, in ascending order of offsets."""
    low, high = rank * shard, (rank + 1) * shard
    found = []
    for index in sorted(range(len(offsets)), key=lambda index: offsets[index]):
        start, end = max(offsets[index], low), min(offsets[index] + sizes[index], high)
        if start < end:
            found.append((index, start - offsets[index], end - start))
    return found


def chunk_elements(offsets: Sequence[int], sizes: Sequence[int], shard: int, num_ranks: int, itemsize: int) -> int:
    """Elements that are sent to one rank at a time: as many as let the chunks to and from all other ranks fit into a bucket."""
    longest = max(sum(count for _, _, count in own_pieces(offsets, sizes, shard, rank)) for rank in range(num_ranks))
    return max(1, min(longest, BUCKET_BYTES // (2 * max(num_ranks - 1, 1) * itemsize)))


def bucket_bytes(offsets: Sequence[int], sizes: Sequence[int], shard: int, num_ranks: int, itemsize: int) -> int:
    """Bytes that a reduction of these tensors needs for what it sends and receives."""
    return 2 * (num_ranks - 1) * chunk_elements(offsets, sizes, shard, num_ranks, itemsize) * itemsize
