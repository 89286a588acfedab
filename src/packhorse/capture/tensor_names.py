"""Names in a tensor plan: which modules a pattern matches, and what to say where it matches none, or where there is no plan."""

import difflib
import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from packhorse.errors import UserError

_MOST_LISTED = 12


def matching(pattern: Any, names: Iterable[str], prefix: str) -> list[str]:
    """Those of `names` below `prefix` that the pattern is all of, else those that end in it."""
    if not isinstance(pattern, str):
        raise UserError(f"tensor_plan: a pattern is a string such as 'layers.*.mlp.up_proj', not {pattern!r}")
    expression = r"\.".join(re.escape(part).replace(r"\*", "[^.]*" if part != "*" else "[^.]+") for part in pattern.split("."))
    below = [name for name in names if name.startswith(prefix)]
    exact = [name for name in below if re.fullmatch(expression, name[len(prefix) :])]
    return exact or [name for name in below if re.fullmatch(rf"(.*\.)?{expression}", name[len(prefix) :])]


def is_transposed(module: nn.Module) -> bool:
    """Hugging Face's Conv1D: a linear layer whose weight is (inputs, outputs). By name, since the library need not be there."""
    return any(kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.") for kind in type(module).__mro__)


def _starred(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _linear_patterns(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Pattern -> (inputs, outputs) of the linear layers that have it; the first of them."""
    found: dict[str, tuple[int, int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            found.setdefault(_starred(name), (module.in_features, module.out_features))
        elif is_transposed(module):
            inputs, outputs = module.weight.shape  # type: ignore[misc, union-attr]
            found.setdefault(_starred(name), (inputs, outputs))
    return found


def near(pattern: str, model: nn.Module) -> str:
    """The end of a message about a pattern that matches nothing: which modules may be meant."""
    known = [*_linear_patterns(model), *(_starred(name) for name, module in model.named_modules() if isinstance(module, nn.Embedding))]
    length = len(pattern.split("."))
    ends = dict.fromkeys(".".join(name.split(".")[-length:]) for name in known)
    close = difflib.get_close_matches(pattern, ends, n=3, cutoff=0.4)
    return f"; near to it are {', '.join(close)}" if close else f"; modules that can be cut are {_listed(known)}"


def no_plan(model: nn.Module, degree: int) -> str:
    """The message that a model has no plan, with one to begin from."""
    found = _linear_patterns(model)
    start = f"tp={degree}: {type(model).__name__} has no plan of which module is cut how, and none is known for it"
    if not found:
        return f"{start}, nor has it linear layers that one could name; use these ranks as dp"
    wide = [(one, other) for one in found for other in found if one != other and found[one] == found[other][::-1] and found[one][0] < found[one][1]]
    first, second = wide[0] if wide else (next(iter(found)), None)
    example = f'{{"{first}": "column"' + (f', "{second}": "row"' if second else "") + "}"
    return (
        f"{start}; give one, such as tensor_plan={example} (in a file: a table [mesh.tensor_plan]). Its linear layers, as inputs x outputs: "
        f"{_listed([f'{name} {inputs} x {outputs}' for name, (inputs, outputs) in found.items()])}. docs/tensor.md has the words"
    )


def _listed(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names[:_MOST_LISTED]) + (f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else "") or "none"
