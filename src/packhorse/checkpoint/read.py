"""A checkpoint on disk -> tensors and values, after every byte has been checked. Nothing is unpickled, so loading runs no code."""

import hashlib
import os
import stat
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from packhorse.checkpoint.layout import MANIFEST, Manifest, decode_manifest, replaced_path
from packhorse.checkpoint.stream import dtype_name
from packhorse.errors import CheckpointError

_CHUNK_BYTES = 16 * 2**20


def read_checkpoint(folder: Path, prefixes: tuple[str, ...] = ("",)) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The checkpoint `folder` -> (name -> tensor on the CPU, meta). Tied tensors come back as one tensor under both names.

    Every byte is checked, and the tensors whose names begin with one of `prefixes` are read into memory.

    Raises CheckpointError naming the file if anything is missing, foreign, of another version, of another size or checksum than the
    manifest says, or reaches outside the folder.
    """
    folder = _present(folder)
    manifest = verify_checkpoint(folder)
    owners = {name: name for name in manifest.tensors} | manifest.aliases
    owners = {name: owner for name, owner in owners.items() if name.startswith(prefixes)}
    wanted = set(owners.values())
    tensors: dict[str, Tensor] = {}
    present: set[str] = set()
    for name in manifest.files:
        present |= _read_tensors(folder / name, wanted, into=tensors)
    found = {name: (dtype_name(name, tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}
    if present != manifest.tensors.keys() or found != {name: manifest.tensors.get(name) for name in wanted}:
        raise CheckpointError(f"{folder / MANIFEST} does not list the tensors that its files hold; load another checkpoint")
    return {name: tensors[owner] for name, owner in owners.items()}, manifest.meta


def verify_checkpoint(folder: Path) -> Manifest:
    """Checks names, sizes and checksums of the checkpoint `folder` and returns its manifest. Reads every file once.

    Raises CheckpointError naming the first file that is wrong.
    """
    folder = _present(folder)
    path = folder / MANIFEST
    _require_plain_file(path)
    try:
        manifest = decode_manifest(path.read_bytes(), path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; make it readable") from error
    for name, (size_bytes, digest) in manifest.files.items():
        # The manifest may come from anywhere: only a plain name may become a path.
        if name != os.path.basename(name) or name in ("", ".", "..") or "\\" in name or "\0" in name:
            raise CheckpointError(f"{path} names the file {name!r}, which is not a plain file name; it is refused, load another checkpoint")
        _require_plain_file(folder / name)
        _require_content(folder / name, size_bytes, digest)
    return manifest


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


def _read_tensors(path: Path, wanted: set[str], *, into: dict[str, Tensor]) -> set[str]:
    """Reads the `wanted` tensors of a file; returns the names of all that are in it."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            present = set(file.keys())
            into |= {name: file.get_tensor(name) for name in sorted(present & wanted)}
            return present
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}; load another checkpoint") from error
