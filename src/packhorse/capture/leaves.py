"""What the arguments and results of a call hold. Models make many thousands of calls; torch's own walk through containers takes ten times as long."""

from typing import Any

import torch
from torch.utils import _pytree as pytree


def leaves(found: Any) -> list:
    """What tuples, lists and dicts hold, in order; what other containers hold as torch sees them."""
    kind = type(found)
    if kind is tuple or kind is list:
        return [leaf for item in found for leaf in leaves(item)]
    if kind is dict:
        return [leaf for item in found.values() for leaf in leaves(item)]
    return [found] if found is None or isinstance(found, (torch.Tensor, int, float, str)) else pytree.tree_leaves(found)
