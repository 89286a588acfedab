"""A checkpoint of any mesh -> the same one in as many files as asked for. It streams: no tensor is ever whole in memory.

A job loads a checkpoint of any number of files; fewer of them are for people and other programs (one file has every tensor in its shape), as many as
ranks for disks that are faster together. The files get equal shares of the bytes. Tensors that tensor parallel ranks had cut are put together.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from packhorse.checkpoint.layout import TENSORS, rank_file
from packhorse.checkpoint.read import Checkpoint, open_checkpoint
from packhorse.checkpoint.stream import DTYPES, Streamed, write_tensors
from packhorse.checkpoint.write import commit, saving, staged
from packhorse.errors import CheckpointError


def reshard(source: Path, out: Path, num_files: int) -> int:
    """Writes the checkpoint `source` as the checkpoint `out` of `num_files` files, and returns its bytes. Every tensor and value is kept, also the
    random states of all ranks.

    Raises CheckpointError if `source` is not whole, `out` exists, or cannot be written.
    """
    if num_files < 1:
        raise CheckpointError(f"a checkpoint cannot be in {num_files} files; give 1 or more")
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out} exists already, and it is not overwritten; choose a path that does not exist yet")
    saved, out = open_checkpoint(source), Path(os.path.abspath(out))
    shares = _shares(saved, num_files)
    names = [TENSORS] if num_files == 1 else [rank_file(index) for index in range(num_files)]
    with staged(out) as staging, saving(out, staging):
        files = {name: write_tensors(staging / name, _streamed(saved, share, num_files)) for name, share in zip(names, shares)}
        pieces = {tensor: tuple((name, *share[tensor]) for name, share in zip(names, shares) if tensor in share) for tensor in saved.manifest.tensors}
        pieces = {tensor: tuple(piece for piece in found if piece[1] < piece[2]) for tensor, found in pieces.items()}
        commit(staging, out, replace(saved.manifest, files=files, pieces=pieces, parts={}))
    return sum(size_bytes for size_bytes, _ in files.values())


def _shares(saved: Checkpoint, num_files: int) -> list[dict[str, tuple[int, int]]]:
    """What each file gets: tensor -> [first, end) of its elements. All tensors lie one after another, and are cut after as many bytes each."""
    sizes = {name: saved.manifest.count(name) * DTYPES[dtype].itemsize for name, (dtype, _) in saved.manifest.tensors.items()}
    share = max(1, -(-sum(sizes.values()) // num_files))
    found: list[dict[str, tuple[int, int]]] = [{} for _ in range(num_files)]
    at = 0
    for name in sorted(sizes):
        count, itemsize = saved.manifest.count(name), DTYPES[saved.manifest.tensors[name][0]].itemsize
        for index in range(at // share, (at + max(sizes[name], 1) - 1) // share + 1):
            # an element that a cut goes through belongs to the file in which it begins
            first, end = (min(max(-(-(edge - at) // itemsize), 0), count) for edge in (index * share, (index + 1) * share))
            if first < end or not count:
                found[min(index, num_files - 1)][name] = (first, end)
        at += sizes[name]
    return found


def _streamed(saved: Checkpoint, share: dict[str, tuple[int, int]], num_files: int) -> dict[str, Streamed]:
    found = {}
    for name, (first, end) in share.items():
        dtype, shape = saved.manifest.tensors[name]
        in_shape = num_files == 1 and name not in saved.manifest.strides
        found[name] = Streamed(DTYPES[dtype], shape if in_shape else (end - first,), _from(saved, name, first))
    return found


def _from(saved: Checkpoint, name: str, start: int) -> Callable[[int, int], Tensor]:
    return lambda first, end: saved.elements(name, start + first, start + end)
