"""A compiled step <-> a checkpoint: `packhorse.save` and `packhorse.load`."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from packhorse.checkpoint.read import read_checkpoint
from packhorse.checkpoint.write import write_checkpoint
from packhorse.errors import CheckpointError


class Stateful(Protocol):
    """What a compiled step offers to be saved: parameters, buffers, optimizer moments, step counts and random state."""

    def training_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...

    def load_training_state(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None: ...


def save(path: str | PathLike[str], step: Stateful, extra: Mapping[str, Any] | None = None) -> None:
    """Saves everything that `step` needs to continue, and the JSON-able `extra`, as the checkpoint folder `path`.

    Raises CheckpointError if that is not possible; an earlier checkpoint at `path` is then still there.
    """
    tensors, meta = step.training_state()
    write_checkpoint(Path(path), tensors, {"step": meta, "extra": dict(extra or {})})


def load(path: str | PathLike[str], step: Stateful) -> dict[str, Any]:
    """Puts `step` where it was when the checkpoint `path` was saved, and returns the `extra` of that time.

    Raises CheckpointError, before anything changes, if the checkpoint is not whole or was saved from a model or optimizer whose
    tensors have other names, shapes or dtypes; the first difference is named.
    """
    tensors, meta = read_checkpoint(Path(path))
    if set(meta) != {"step", "extra"}:
        raise CheckpointError(f"{path} was not saved by packhorse.save; load one that was")
    _require_same(tensors, step.training_state()[0], path)
    step.load_training_state(tensors, meta["step"])
    return meta["extra"]


def _require_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], path: str | PathLike[str]) -> None:
    for name in sorted(found.keys() | wanted.keys()):
        seen, expected = (_describe(tensors.get(name)) for tensors in (found, wanted))
        if seen != expected:
            raise CheckpointError(
                f"{path} does not fit this model and optimizer: {name!r} is {seen} in the checkpoint and {expected} here; "
                "use the model, data and optimizer settings of the run that saved it, or start a new run"
            )


def _describe(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
