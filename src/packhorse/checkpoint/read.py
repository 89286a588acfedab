"""A checkpoint on disk -> tensors and values, after every byte has been checked. Nothing is unpickled, so loading runs no code."""

import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from packhorse.checkpoint.layout import MANIFEST, Manifest, check_pieces, decode_manifest, replaced_path
from packhorse.checkpoint.rows import Read, collected, for_part, from_part
from packhorse.checkpoint.stream import DTYPES
from packhorse.errors import CheckpointError
from packhorse.parallel.part import Part
from packhorse.planning.placement import same_layout
from packhorse.runtime.parts import in_memory_order
from packhorse.runtime.ranks import Ranks
from packhorse.runtime.together import of_each

_CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint. What is read of it is mapped from the files where it lies in one piece, and takes no memory before it is used."""

    folder: Path
    manifest: Manifest
    _open: dict[str, Any] = field(default_factory=dict)

    def owner(self, name: str) -> str:
        """The name under which the tensor's bytes are stored."""
        return self.manifest.aliases.get(name, name)

    def stored(self, name: str, first: int, end: int) -> Tensor:
        """Elements [first, end) of a stored tensor, in the order in which it is stored: (end - first,)."""
        found = [
            self._file(file).get_tensor(name).view(-1)[max(first, low) - low : min(end, high) - low]
            for file, low, high in self.manifest.pieces[name]
            if max(first, low) < min(end, high)
        ]
        if not found:
            return torch.empty(0, dtype=self.dtype(name))
        return found[0] if len(found) == 1 else torch.cat(found)

    def elements(self, name: str, first: int, end: int) -> Tensor:
        """Elements [first, end) of a stored tensor in the order of memory: (end - first,). Of one that is stored in parts only these are read."""
        parts = self.manifest.parts_of(name)
        if not parts:
            return self.stored(name, first, end)
        sources = [from_part(part, partial(self._stored_after, name, part.first)) for part in parts]
        return collected(first, end, parts[0].row, sources, self.dtype(name))

    def whole(self, name: str) -> Tensor:
        """A whole tensor, in its shape."""
        name = self.owner(name)
        shape = self.manifest.tensors[name][1]
        return self.elements(name, 0, self.manifest.count(name)).as_strided(shape, self.manifest.strides_of(name))

    def part(self, name: str, shape: Sequence[int], strides: Sequence[int], first: int, end: int, part: Part | None = None) -> Tensor:
        """Elements [first, end) of the tensor as if it had these strides, or of a part of it, without padding. The whole of it is read only where the
        strides are others than the stored ones."""
        name = self.owner(name)
        if first < end and not same_layout(tuple(shape), tuple(strides), self.manifest.strides_of(name)):
            whole = in_memory_order(self.whole(name), shape, strides)
            return whole[first:end] if part is None else self._of_part(name, part, first, end, lambda low, high: whole[low:high])
        if part is None:
            return self.elements(name, first, end)
        if self.manifest.parts.get(name) == (part.dim, part.ranges):
            return self.stored(name, part.first + first, part.first + end)
        return self._of_part(name, part, first, end, partial(self.elements, name))

    def dtype(self, name: str) -> torch.dtype:
        """Of a stored tensor."""
        return DTYPES[self.manifest.tensors[name][0]]

    def _of_part(self, name: str, part: Part, first: int, end: int, read: Read) -> Tensor:
        return collected(first, end, part.lines * part.inner, [for_part(part, read)], self.dtype(name))

    def _stored_after(self, name: str, offset: int, first: int, end: int) -> Tensor:
        return self.stored(name, offset + first, offset + end)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = _opened(self.folder / name)
        return self._open[name]


def open_checkpoint(folder: Path, ranks: Ranks | None = None) -> Checkpoint:
    """The checkpoint `folder`, after every byte of it has been checked: as `verify_checkpoint`."""
    manifest = verify_checkpoint(folder, ranks)
    return Checkpoint(_present(folder), manifest)


def read_checkpoint(folder: Path, prefixes: tuple[str, ...] = ("",)) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The checkpoint `folder` -> (name -> tensor on the CPU, meta). Tied tensors come back as one tensor under both names.

    Every byte is checked, and the tensors whose names begin with one of `prefixes` are read into memory.

    Raises CheckpointError naming the file if anything is missing, foreign, of another version, of another size or checksum than the
    manifest says, or reaches outside the folder.
    """
    checkpoint = open_checkpoint(folder)
    names = [name for name in (*checkpoint.manifest.tensors, *checkpoint.manifest.aliases) if name.startswith(prefixes)]
    owners = {owner: checkpoint.whole(owner) for owner in {checkpoint.owner(name) for name in names}}
    return {name: owners[checkpoint.owner(name)] for name in names}, checkpoint.manifest.meta


def verify_checkpoint(folder: Path, ranks: Ranks | None = None) -> Manifest:
    """Checks names, sizes, checksums and contents of the checkpoint `folder` and returns its manifest. Reads every file once; with several ranks each
    reads its share of the files.

    Raises CheckpointError naming the first file that is wrong, on every rank if on one.
    """
    manifest: list[Manifest] = []

    def check() -> str:
        whole = _present(folder)
        found, digest = _read_manifest(whole / MANIFEST)
        manifest.append(found)
        rank, count = (0, 1) if ranks is None else (ranks.rank, ranks.mesh.world_size)
        for name in sorted(found.files)[rank::count]:
            _check_file(whole, name, found)
        _require_nothing_else(whole, found)
        check_pieces(found, whole / MANIFEST)
        return digest

    digests = of_each(ranks, check)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise CheckpointError(
                f"rank 0 and rank {rank} see different checkpoints at {folder.absolute()}; checkpoints have to be on a disk that all machines share"
            )
    return manifest[0]


def _read_manifest(path: Path) -> tuple[Manifest, str]:
    """The manifest, of which every name may become a path, and its SHA-256 in hex."""
    _require_plain_file(path)
    try:
        encoded = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; make it readable") from error
    manifest = decode_manifest(encoded, path)
    for name in manifest.files:
        # The manifest may come from anywhere: only a plain name may become a path.
        if name != os.path.basename(name) or name in ("", ".", "..") or "\\" in name or "\0" in name:
            raise CheckpointError(f"{path} names the file {name!r}, which is not a plain file name; it is refused, load another checkpoint")
    return manifest, hashlib.sha256(encoded).hexdigest()


def _require_nothing_else(folder: Path, manifest: Manifest) -> None:
    others = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST and path.name not in manifest.files)
    if others:
        raise CheckpointError(
            f"{folder / others[0]} is not part of this checkpoint, and nobody has checked it; move it away, or load another checkpoint"
        )


def _check_file(folder: Path, name: str, manifest: Manifest) -> None:
    """Raises CheckpointError unless the file is the ordinary, whole one that the manifest describes."""
    path = folder / name
    _require_plain_file(path)
    _require_content(path, *manifest.files[name])
    wanted, file = manifest.pieces_of(name), _opened(path)
    found = set(file.keys())
    empty = {other for other in found - wanted.keys() if other in manifest.tensors and not manifest.count(other)}
    fits = found - empty == wanted.keys()
    for tensor in wanted if fits else ():
        stored, (dtype, shape) = file.get_slice(tensor), manifest.tensors[tensor]
        whole = tuple(stored.get_shape()) == shape and wanted[tensor] == manifest.count(tensor)
        fits &= stored.get_dtype() == dtype and dtype in DTYPES and (whole or list(stored.get_shape()) == [wanted[tensor]])
    if not fits or not set(manifest.aliases.values()) <= manifest.tensors.keys():
        raise CheckpointError(f"{folder / MANIFEST} does not list the tensors that its files hold ({name}); load another checkpoint")


def _present(folder: Path) -> Path:
    if folder.is_dir():
        return folder
    # A writer was killed between its two renames: the earlier checkpoint of this name is whole, under its waiting name.
    if not folder.exists() and replaced_path(folder).is_dir():
        return replaced_path(folder)
    raise CheckpointError(f"there is no checkpoint at {folder.absolute()}; expected a folder such as RUN/checkpoints/step-100")


def _require_plain_file(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        raise CheckpointError(f"{path} is missing ({error.strerror}), so this is not a complete packhorse checkpoint; load another one") from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is not an ordinary file (a link, folder or device); it is refused, load another checkpoint")


def _require_content(path: Path, size_bytes: int, digest: str) -> None:
    seen_bytes = path.stat().st_size
    if seen_bytes != size_bytes:
        raise CheckpointError(f"{path} is damaged: {seen_bytes} bytes, expected {size_bytes}; load an earlier checkpoint")
    sha = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                sha.update(chunk)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; make it readable") from error
    if sha.hexdigest() != digest:
        raise CheckpointError(f"{path} is damaged: SHA-256 {sha.hexdigest()}, expected {digest}; load an earlier checkpoint")


def _opened(path: Path) -> Any:
    """The safetensors file. Its checksum was right, so whoever made the manifest meant it."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}; load another checkpoint") from error
