"""How a batch is given to a model, and what of it a plan depends on.

A dict calls model(**batch), a tuple model(*batch), a tensor model(batch); a list is micro-batches, always.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from packhorse.errors import BatchError


@dataclass(frozen=True)
class Leaf:
    """One tensor of a batch: its place in the structure, dtype, shape, strides."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Signature:
    """What a program depends on: the structure, its constants (numbers, strings, None), and dtype and shape of every tensor."""

    structure: str
    constants: tuple[Any, ...]
    leaves: tuple[Leaf, ...]


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """The tensors of one micro-batch, in the order of Signature.leaves."""
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def signature(batch: Any) -> Signature:
    """The signature of one micro-batch. Raises BatchError for anything but a dict, a tuple or a tensor."""
    if not isinstance(batch, (dict, tuple, torch.Tensor)):
        raise BatchError(
            f"a batch is a dict (model(**batch)), a tuple (model(*batch)) or a tensor (model(batch)), and a list of those is micro-batches; "
            f"seen {type(batch).__name__}"
        )
    flat, spec = pytree.tree_flatten_with_path(batch)
    leaves: list[Leaf] = []
    constants: list[tuple[str, str, Any]] = []
    for path, leaf in flat:
        if not isinstance(leaf, (torch.Tensor, bool, int, float, str, type(None))):
            raise BatchError(
                f"batch entry {leaf_name(path)!r} is a {type(leaf).__module__}.{type(leaf).__name__}; a batch is made "
                f"of tensors, numbers, strings and "
                "None (in dicts, tuples and lists): convert it, for example with torch.as_tensor"
            )
        if isinstance(leaf, torch.Tensor):
            name = leaf_name(path)
            name = f"{name} ({len(leaves)})" if any(known.path == name for known in leaves) else name
            leaves.append(Leaf(name, leaf.dtype, tuple(leaf.shape), tuple(leaf.stride())))
        else:
            constants.append((leaf_name(path), type(leaf).__name__, leaf))
    return Signature(str(spec), tuple(constants), tuple(leaves))


def leaf_name(path: tuple) -> str:
    """A readable name of a leaf's place: "ids", "0", "inputs.mask"."""
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
    return ".".join(parts) or "batch"


def replace_tensors(batch: Any, tensors: list[torch.Tensor]) -> Any:
    """The batch with its tensors exchanged, in order."""
    flat, spec = pytree.tree_flatten(batch)
    fresh = iter(tensors)
    return pytree.tree_unflatten([next(fresh) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat], spec)


def micro_batches(batch: Any, num_micro_batches: int) -> list[Any]:
    """The micro-batches of one step, their keyword arguments in order of name. Raises BatchError if their number is not the plan's."""
    found = [canonical(micro) for micro in (batch if isinstance(batch, list) else [batch])]
    if len(found) != num_micro_batches:
        raise BatchError(
            f"the plan is made for num_micro_batches={num_micro_batches}, but the step was given {len(found)} "
            f"({'a list' if isinstance(batch, list) else type(batch).__name__}); pass "
            f"{'one batch' if num_micro_batches == 1 else f'a list of {num_micro_batches} batches'}, or plan again with another num_micro_batches"
        )
    return found


def canonical(batch: Any) -> Any:
    """The batch with its keyword arguments in order of name, as a dict: {"y": ..., "x": ...} is the same batch as {"x": ..., "y": ...}.

    Any mapping will do, such as what a Hugging Face tokenizer returns.
    """
    return {key: batch[key] for key in sorted(batch, key=str)} if isinstance(batch, Mapping) else batch


def check_like(planned: Signature, given: Signature) -> None:
    """Raises BatchError unless `given` differs from `planned` in sizes of dims only."""
    if planned.structure != given.structure or [c[:2] for c in planned.constants] != [c[:2] for c in given.constants]:
        raise BatchError(
            f"the batch has another structure than the plan: seen {_names(given)}, expected {_names(planned)}; pass the same keys, or plan again"
        )
    for ours, theirs in zip(planned.leaves, given.leaves):
        if ours.dtype != theirs.dtype or len(ours.shape) != len(theirs.shape):
            raise BatchError(
                f"batch tensor {theirs.path!r}: seen {theirs.dtype} of shape {list(theirs.shape)}, expected {ours.dtype} with "
                f"{len(ours.shape)} dims like {list(ours.shape)}; convert it (for example with .to({ours.dtype})), or plan again with such a batch"
            )


def _names(given: Signature) -> str:
    return ", ".join([leaf.path for leaf in given.leaves] + [f"{name} ({kind})" for name, kind, _ in given.constants]) or "nothing"


def call(model: Any, batch: Any) -> Any:
    """model(**batch), model(*batch) or model(batch)."""
    if isinstance(batch, dict):
        return model(**batch)
    if isinstance(batch, tuple):
        return model(*batch)
    return model(batch)
