"""Marks: what a user keeps for the backward pass, or recomputes there, said by hand in the model's code.

A capture sees these functions as it sees those of torch: through a TorchFunctionMode (capture/location.py). Without a mode they do nothing.
"""

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from packhorse.errors import UserError


def keep(x: Tensor, name: str) -> Tensor:
    """x itself, of any shape. In a captured step the operator that made it is marked: its results are kept for the backward pass.

    name: what the plan calls it; need not be unique. Use what is returned: `h = packhorse.keep(h, "hidden")`.
    The mark stands for all results of the operator that made x, or whose result x is a view of. Evaluation ignores it.
    Raises UserError if x is no tensor or the name no text; packhorse.plan raises CaptureError, naming the line, if no operator made x (a parameter,
    a part of the batch), if the same value is marked with drop too, and if nothing uses what is returned.
    """
    _check("keep", x)
    if not isinstance(name, str):
        raise UserError(f'packhorse.keep(x, name): name is a {type(name).__name__}, expected a text such as "hidden"')
    return handle_torch_function(keep, (x,), x, name) if has_torch_function_unary(x) else x


def drop(x: Tensor) -> Tensor:
    """x itself, of any shape. In a captured step the operator that made it is marked: its results are recomputed in the backward pass.

    As `keep` in all else.
    """
    _check("drop", x)
    return handle_torch_function(drop, (x,), x) if has_torch_function_unary(x) else x


def mark_of(function: object, args: tuple) -> tuple[str, str] | None:
    """(mark, name) if `function` is one of those above, as a TorchFunctionMode sees it called; None for any other."""
    if function is keep:
        return "keep", args[1]
    return ("drop", "") if function is drop else None


def _check(mark: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise UserError(f"packhorse.{mark}: expected a tensor, seen {type(x).__name__}; mark each tensor of it by itself")
