"""A compiled step <-> a checkpoint: `packhorse.save` and `packhorse.load`, on one rank or many."""

from collections.abc import Iterator, Mapping
from os import PathLike
from os.path import abspath
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from packhorse.checkpoint.read import Checkpoint, open_checkpoint
from packhorse.checkpoint.stream import DTYPES
from packhorse.checkpoint.write import write_checkpoint
from packhorse.errors import CheckpointError
from packhorse.runtime.held import Piece
from packhorse.runtime.rank_random import as_rank_0s, may_be_absent
from packhorse.runtime.ranks import Ranks
from packhorse.runtime.together import from_first, together


class Stateful(Protocol):
    """What a compiled step offers to be saved: parameters, buffers, optimizer moments, step counts and random state, as Tensors, or as Pieces, what
    this rank holds of them. A step of several ranks has them as `ranks`."""

    def training_state(self) -> tuple[Mapping[str, Any], dict[str, Any]]: ...

    def load_training_state(self, tensors: Mapping[str, Tensor], meta: dict[str, Any]) -> None: ...


def save(path: str | PathLike[str], step: Stateful, extra: Mapping[str, Any] | None = None) -> None:
    """Saves everything that `step` needs to continue, and the JSON-able `extra`, as the checkpoint folder `path`.

    With several ranks every rank calls it and writes its own part; path and `extra` are rank 0's, and so are buffers.
    Raises CheckpointError, on every rank, if that is not possible; an earlier checkpoint at `path` is then still there.
    """
    tensors, meta = step.training_state()
    write_checkpoint(Path(path), tensors, {"step": meta, "extra": dict(extra or {})}, _ranks(step))


def load(path: str | PathLike[str], step: Stateful) -> dict[str, Any]:
    """Puts `step` where it was when the checkpoint `path` was saved, and returns the `extra` of that time.

    It may have been saved on any other mesh and at any other stage of ZeRO. With several ranks every rank calls it, and path is rank 0's; each reads
    only what it holds. A rank goes on with the random state that it saved (runtime/rank_random.py says what a rank does that there was not).
    Raises CheckpointError, on every rank and before anything changes, if the checkpoint is not whole or was saved from a model or optimizer whose
    tensors have other names, shapes or dtypes; the first difference is named.
    """
    ranks = _ranks(step)
    path = Path(from_first(ranks, lambda: abspath(path)))
    saved = open_checkpoint(path, ranks)
    if set(saved.manifest.meta) != {"step", "extra"}:
        raise CheckpointError(f"{path} was not saved by packhorse.save; load one that was")
    wanted, _ = step.training_state()
    together(ranks, lambda: _require_same(saved, wanted, path))
    step.load_training_state(_Contents(saved, wanted), saved.manifest.meta["step"])
    return saved.manifest.meta["extra"]


class _Contents(Mapping[str, Tensor]):
    """The tensors of a checkpoint as a step wants them, pieces flat and without padding. Each is read when it is looked up, so that none waits in
    memory."""

    def __init__(self, saved: Checkpoint, wanted: Mapping[str, Tensor | Piece]):
        self.saved, self.wanted = saved, wanted

    def __getitem__(self, name: str) -> Tensor:
        piece = self.wanted.get(name)
        if isinstance(piece, Piece):
            return self.saved.part(name, piece.shape, piece.strides, *piece.span, piece.part)
        return self.saved.whole(name)

    def __iter__(self) -> Iterator[str]:
        return iter((*self.saved.manifest.tensors, *self.saved.manifest.aliases))

    def __len__(self) -> int:
        return len(self.saved.manifest.tensors) + len(self.saved.manifest.aliases)


def _ranks(step: Stateful) -> Ranks | None:
    return getattr(step, "ranks", None)


def _require_same(saved: Checkpoint, wanted: Mapping[str, Tensor | Piece], path: Path) -> None:
    stored = saved.manifest.tensors
    found = {name: _describe(DTYPES[stored[saved.owner(name)][0]], stored[saved.owner(name)][1]) for name in (*stored, *saved.manifest.aliases)}
    found = {name: words for name, words in found.items() if not may_be_absent(name)}
    expected = {as_rank_0s(name): _described(tensor) for name, tensor in wanted.items() if not may_be_absent(as_rank_0s(name))}
    for name in sorted(found.keys() | expected.keys()):
        seen, here = found.get(name, "absent"), expected.get(name, "absent")
        if seen != here:
            raise CheckpointError(
                f"{path} does not fit this model and optimizer: {name!r} is {seen} in the checkpoint and {here} here; "
                "use the model, data and optimizer settings of the run that saved it, or start a new run"
            )


def _described(tensor: Tensor | Piece) -> str:
    return _describe(tensor.held.dtype, tensor.shape) if isinstance(tensor, Piece) else _describe(tensor.dtype, tensor.shape)


def _describe(dtype: Any, shape: Any) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"
