"""Scheduler states and parameter-group numbers <-> what JSON can hold: nested lists and dicts of numbers, strings, flags; tensors of one number."""

from typing import Any

import torch

from packhorse.errors import CheckpointError


def to_plain(value: Any, where: str) -> Any:
    """The value as JSON can hold it. Raises CheckpointError naming `where` for anything else."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [to_plain(item, where) for item in value]
    if isinstance(value, dict):
        return {"items": [[to_plain(key, where), to_plain(item, f"{where}.{key}")] for key, item in value.items()]}
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__name__}, which a checkpoint cannot hold "
        f"(numbers, strings, lists and dicts of them can); "
        "use a scheduler whose state is made of those"
    )


def from_plain(value: Any, like: Any) -> Any:
    """What `to_plain` was given: `like` is the present value, whose tuples and tensors come back as such."""
    if isinstance(value, dict):
        known = like if isinstance(like, dict) else {}
        made = {from_plain(key, None): from_plain(item, known.get(from_plain(key, None))) for key, item in value["items"]}
        return type(like)(made) if isinstance(like, dict) else made
    if isinstance(value, list):
        items = [from_plain(item, like[k] if isinstance(like, (list, tuple)) and k < len(like) else None) for k, item in enumerate(value)]
        return tuple(items) if isinstance(like, tuple) else items
    return torch.full_like(like, value) if isinstance(like, torch.Tensor) else value
