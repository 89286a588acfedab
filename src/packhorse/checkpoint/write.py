"""Tensors and values -> a checkpoint on disk that is either there and complete, or not there at all.

Staging folder, fsync of every file and folder, rename, fsync of the parent: see layout.py for the names.
Known shortcoming: a staging folder counts as left over when no process of its number runs on this machine, so two machines must not
write checkpoints into one folder at the same time (rank 0 alone writes).
"""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from packhorse.checkpoint.layout import MANIFEST, STAGING_PREFIX, TENSORS, Manifest, encode_manifest, replaced_path, step_of
from packhorse.checkpoint.read import verify_checkpoint
from packhorse.checkpoint.stream import dtype_name, write_tensors
from packhorse.errors import CheckpointError


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Saves name -> tensor (any shape, strides and device) and JSON-able `meta` as the checkpoint `folder`.

    Tied tensors (the same elements under two names) are stored once and come back tied. An earlier checkpoint at `folder` stays
    whole and readable until the new one is complete, then goes; a folder that is something else is never touched.

    Raises CheckpointError if the disk is full, a folder cannot be written, `folder` exists and is not a checkpoint, or a tensor or
    value cannot be stored. What was there before is there after.
    """
    folder = Path(os.path.abspath(folder))
    described = {name: (dtype_name(name, tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}
    owners, aliases = _tied(tensors)
    staging = folder.with_name(f"{STAGING_PREFIX}{folder.name}-{os.getpid()}")
    try:
        _require_replaceable(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _finish_earlier_writes(folder)
        staging.mkdir()
        files = {TENSORS: write_tensors(staging / TENSORS, owners)}
        _write_file(staging / MANIFEST, encode_manifest(Manifest(files, {name: described[name] for name in owners}, aliases, dict(meta))))
        _sync_folder(staging)
        _put_in_place(staging, folder)
    except OSError as error:
        raise CheckpointError(
            f"cannot save the checkpoint {folder}: {error.strerror or error} ({error.filename or staging}); nothing that was saved "
            "before has changed. Free space on that disk or choose another folder, then resume from the last checkpoint"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def prune_checkpoints(root: Path, keep_last: int, *, keep_every: int = 0, report: Callable[[str], None] = print) -> list[Path]:
    """Deletes step-N of `root` and returns those deleted, oldest first. The `keep_last` >= 1 newest stay, and multiples of `keep_every` > 0.

    Every byte of the newest one is read back first. If it is not whole nothing is deleted, so the only good checkpoint can never go, and it is
    set aside as damaged-0-step-N, so that it never counts as one of those that stay. Links are left alone and not counted.
    What goes wrong here is told to `report`: it is no reason to end a run whose state is saved.
    """
    assert keep_last >= 1
    steps = sorted((step, path) for path in root.iterdir() if (step := step_of(path)) is not None and path.is_dir() and not path.is_symlink())
    deleted: list[Path] = []
    try:
        if steps and (reason := _damage(steps[-1][1])):
            report(f"{reason}; it is kept as {set_aside(steps[-1][1], 'damaged').name}, and every older checkpoint stays")
            return []
        for step, path in steps[:-keep_last]:
            if not keep_every or step % keep_every:
                # Out of sight in one move first: a kill half-way through deleting must not leave half a step-N.
                doomed = path.with_name(f"{STAGING_PREFIX}{path.name}-{os.getpid()}")
                path.rename(doomed)
                deleted.append(path)
                shutil.rmtree(doomed)
    except OSError as error:
        report(f"cannot delete outdated checkpoints: {error.strerror} ({error.filename}); make {root} writable, or delete them by hand")
    return deleted


def set_aside(folder: Path, word: str) -> Path:
    """Renames the checkpoint step-5 to word-0-step-5, or the first number that is free, and returns that. It is then no step of a run any more."""
    aside = next(name for n in range(10**6) if not (name := folder.with_name(f"{word}-{n}-{folder.name}")).exists())
    return folder.rename(aside)


def _damage(folder: Path) -> str | None:
    try:
        verify_checkpoint(folder)
    except CheckpointError as error:
        return str(error)
    return None


def _tied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors to store, and name -> name of the stored tensor with the very same elements."""
    owners: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    owner_of: dict[tuple, str] = {}
    for name, tensor in tensors.items():
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        # Empty tensors all share the null pointer, and are free to store.
        owner = owner_of.setdefault(key, name) if tensor.numel() else name
        if owner == name:
            owners[name] = tensor
        else:
            aliases[name] = owner
    return owners, aliases


def _require_replaceable(folder: Path) -> None:
    known = {MANIFEST, TENSORS}
    if not folder.exists() and not folder.is_symlink():
        return
    if folder.is_symlink() or not folder.is_dir() or not {path.name for path in folder.iterdir()} <= known:
        raise CheckpointError(
            f"cannot save a checkpoint at {folder}: something that is not a packhorse checkpoint is there, and it is left alone; "
            "choose a path that does not exist yet"
        )


def _finish_earlier_writes(folder: Path) -> None:
    """Puts back or clears what a killed writer left beside `folder`."""
    replaced = replaced_path(folder)
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)
    elif replaced.exists():
        shutil.rmtree(replaced)
    for path in folder.parent.glob(f"{STAGING_PREFIX}*-*"):
        pid = path.name.rpartition("-")[2]
        if pid.isdecimal() and (int(pid) == os.getpid() or not _is_running(int(pid))):
            shutil.rmtree(path, ignore_errors=True)  # litter that cannot be cleared is no reason not to save


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _put_in_place(staging: Path, folder: Path) -> None:
    replaced = replaced_path(folder)
    if folder.exists():
        folder.rename(replaced)
    try:
        staging.rename(folder)
    except OSError:
        if replaced.exists():
            replaced.rename(folder)
        raise
    _sync_folder(folder.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def _write_file(path: Path, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
