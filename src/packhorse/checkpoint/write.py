"""Tensors and values -> a checkpoint on disk that is either there and complete, or not there at all.

Staging folder, fsync of every file and folder, rename, fsync of the parent: see layout.py for the names. Of several ranks each writes a file of its
own; rank 0 alone makes and renames folders, when it has heard that every file is on disk.
Known shortcomings: a staging folder counts as left over when no process of its number runs on this machine, so two jobs on two machines must not
write checkpoints into one folder at the same time. Ranks wait for each other no longer than runtime/ranks.py says.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from packhorse.checkpoint.layout import (
    MANIFEST,
    STAGING_PREFIX,
    TENSORS,
    Manifest,
    check_pieces,
    encode_manifest,
    is_file_of_ours,
    rank_file,
    replaced_path,
    step_of,
)
from packhorse.checkpoint.read import verify_checkpoint
from packhorse.checkpoint.stream import dtype_name, write_tensors
from packhorse.errors import CheckpointError
from packhorse.graph.ir import contiguous_strides
from packhorse.planning.placement import same_layout
from packhorse.runtime.held import Piece
from packhorse.runtime.ranks import Ranks
from packhorse.runtime.together import from_first, is_first, of_each, together


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor | Piece], meta: Mapping[str, Any], ranks: Ranks | None = None) -> None:
    """Saves name -> tensor (any shape, strides and device) and JSON-able `meta` as the checkpoint `folder`.

    With several ranks each calls this with what it holds, a Tensor being its own alone and saved whole; nothing is gathered. `folder` and `meta` are
    rank 0's. Tied tensors (the same elements under two names) are stored once and come back tied. An earlier checkpoint at `folder` stays
    whole and readable until the new one is complete, then goes; a folder that is something else is never touched.

    Raises CheckpointError, on every rank, if one's disk is full, a folder cannot be written, `folder` exists and is not a checkpoint, or a tensor or
    value cannot be stored. What was there before is there after.
    """
    folder = Path(from_first(ranks, lambda: os.path.abspath(folder)))
    with staged(folder, ranks) as staging:
        reports = of_each(ranks, lambda: _write_own(staging, folder, tensors, ranks))
        together(ranks, lambda: commit(staging, folder, _manifest(reports, dict(meta))) if is_first(ranks) else None)


@contextmanager
def staged(folder: Path, ranks: Ranks | None = None) -> Iterator[Path]:
    """The empty folder in which the checkpoint `folder` is built; what is left of it goes at the end. Raises CheckpointError, on every rank, if there
    cannot be one."""
    staging = folder.with_name(f"{STAGING_PREFIX}{folder.name}-{os.getpid()}")

    def begin() -> str:
        with saving(folder, staging):
            _require_replaceable(folder)
            folder.parent.mkdir(parents=True, exist_ok=True)
            _finish_earlier_writes(folder)
            staging.mkdir()
        return str(staging)

    try:
        yield Path(from_first(ranks, begin))
    finally:
        if is_first(ranks):
            shutil.rmtree(staging, ignore_errors=True)


def commit(staging: Path, folder: Path, manifest: Manifest) -> None:
    """Completes a checkpoint of which all files but the manifest are on disk, and puts it in its place. Raises CheckpointError."""
    check_pieces(manifest, staging / MANIFEST)
    with saving(folder, staging):
        _write_file(staging / MANIFEST, encode_manifest(manifest))
        _sync_folder(staging)
        _put_in_place(staging, folder)


def prune_checkpoints(
    root: Path, keep_last: int, *, keep_every: int = 0, report: Callable[[str], None] = print, ranks: Ranks | None = None
) -> list[Path]:
    """Deletes step-N of `root` and returns those deleted, oldest first. The `keep_last` >= 1 newest stay, and multiples of `keep_every` > 0.

    Every byte of the newest one is read back first. If it is not whole nothing is deleted, so the only good checkpoint can never go, and it is
    set aside as damaged-0-step-N, so that it never counts as one of those that stay. Links are left alone and not counted.
    What goes wrong here is told to `report`: it is no reason to end a run whose state is saved. With several ranks each reads back its share; rank 0
    deletes and reports, and its `root` counts.
    """
    assert keep_last >= 1
    steps = [(step, Path(path)) for step, path in from_first(ranks, lambda: _steps(root))]
    if not steps:
        return []
    reason = _damage(steps[-1][1], ranks)
    return [Path(path) for path in from_first(ranks, lambda: _prune(root, steps, reason, keep_last, keep_every, report))]


def _steps(root: Path) -> list[tuple[int, str]]:
    found = ((step_of(path), path) for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted((step, str(path)) for step, path in found if step is not None)


def _prune(
    root: Path, steps: list[tuple[int, Path]], damage: str | None, keep_last: int, keep_every: int, report: Callable[[str], None]
) -> list[str]:
    deleted: list[str] = []
    try:
        if damage:
            report(f"{damage}; it is kept as {set_aside(steps[-1][1], 'damaged').name}, and every older checkpoint stays")
            return []
        for step, path in steps[:-keep_last]:
            if not keep_every or step % keep_every:
                # Out of sight in one move first: a kill half-way through deleting must not leave half a step-N.
                doomed = path.with_name(f"{STAGING_PREFIX}{path.name}-{os.getpid()}")
                path.rename(doomed)
                deleted.append(str(path))
                shutil.rmtree(doomed)
    except OSError as error:
        report(f"cannot delete outdated checkpoints: {error.strerror} ({error.filename}); make {root} writable, or delete them by hand")
    return deleted


def set_aside(folder: Path, word: str) -> Path:
    """Renames the checkpoint step-5 to word-0-step-5, or the first number that is free, and returns that. It is then no step of a run any more."""
    aside = next(name for n in range(10**6) if not (name := folder.with_name(f"{word}-{n}-{folder.name}")).exists())
    return folder.rename(aside)


@contextmanager
def saving(folder: Path, staging: Path) -> Iterator[None]:
    """What the file system refuses inside, as a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot save the checkpoint {folder}: {error.strerror or error} ({error.filename or staging}); nothing that was saved "
            "before has changed. Free space on that disk or choose another folder, then resume from the last checkpoint"
        ) from error


def _write_own(staging: Path, folder: Path, tensors: Mapping[str, Tensor | Piece], ranks: Ranks | None) -> dict[str, Any]:
    """Writes what this rank saves. The part of the manifest that tells of it: a JSON-able dict of its fields."""
    described = {n: (dtype_name(n, t.held if isinstance(t, Piece) else t), tuple(t.shape)) for n, t in tensors.items()}
    pieces = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Piece)}
    owners, aliases = _tied({name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)})
    name = TENSORS if ranks is None else rank_file(ranks.rank)
    spans = {n: p.without_padding(*p.saved) for n, p in pieces.items()}
    own = {n: p.to_save() for n, p in pieces.items() if spans[n][0] < spans[n][1]}
    with saving(folder, staging):
        content = write_tensors(staging / name, owners | own)
    ranges = {n: (0, tensor.numel()) for n, tensor in owners.items()}
    for n, p in pieces.items():
        before = p.part.first if p.part else 0
        ranges[n] = before + spans[n][0], before + spans[n][1]
    return {
        "files": {name: content},
        "tensors": {n: words for n, words in described.items() if n not in aliases},
        "aliases": aliases,
        "strides": {n: p.strides for n, p in pieces.items() if not same_layout(p.shape, p.strides, contiguous_strides(p.shape))},
        "pieces": {n: [(name, first, end)] if first < end else [] for n, (first, end) in ranges.items()},
        "parts": {n: (p.part.dim, p.part.ranges) for n, p in pieces.items() if p.part},
    }


def _manifest(reports: list[dict[str, Any]], meta: dict[str, Any]) -> Manifest:
    """What all ranks tell, as one."""
    merged: dict[str, Any] = {key: {name: value for report in reports for name, value in report[key].items()} for key in reports[0]}
    found = {name: [tuple(piece) for report in reports for piece in report["pieces"].get(name, ())] for name in merged["tensors"]}
    merged["pieces"] = {name: tuple(sorted(pieces, key=lambda piece: piece[1:])) for name, pieces in found.items()}
    return Manifest(**merged, meta=meta)


def _damage(folder: Path, ranks: Ranks | None) -> str | None:
    try:
        verify_checkpoint(folder, ranks)
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
    if not folder.exists() and not folder.is_symlink():
        return
    if folder.is_symlink() or not folder.is_dir() or not all(is_file_of_ours(path.name) for path in folder.iterdir()):
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
