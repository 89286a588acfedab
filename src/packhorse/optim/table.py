"""Optimizer class -> its description; or why there is none."""

import torch
from torch.optim import Optimizer

from packhorse.errors import UserError
from packhorse.graph.operators import MAX_STATES
from packhorse.optim.adadelta import ADADELTA
from packhorse.optim.adagrad import ADAGRAD
from packhorse.optim.adam import ADAM
from packhorse.optim.adamax import ADAMAX
from packhorse.optim.asgd import ASGD
from packhorse.optim.elementwise import Elementwise, is_fused
from packhorse.optim.nadam import NADAM
from packhorse.optim.radam import RADAM
from packhorse.optim.rmsprop import RMSPROP
from packhorse.optim.rprop import RPROP
from packhorse.optim.sgd import SGD

OPTIMIZERS: dict[type[Optimizer], Elementwise] = {
    torch.optim.Adadelta: ADADELTA,
    torch.optim.Adagrad: ADAGRAD,
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAM,
    torch.optim.Adamax: ADAMAX,
    torch.optim.ASGD: ASGD,
    torch.optim.NAdam: NADAM,
    torch.optim.RAdam: RADAM,
    torch.optim.RMSprop: RMSPROP,
    torch.optim.Rprop: RPROP,
    torch.optim.SGD: SGD,
}

# What cannot be worked through element by element in one pass: the reason, and the nearest that can.
_REFUSED: dict[type[Optimizer], str] = {
    torch.optim.LBFGS: "it evaluates the loss several times a step, through a closure; use torch.optim.AdamW, or run it in plain PyTorch",
    torch.optim.SparseAdam: "it updates rows with sparse gradients, and a captured step makes dense ones; use torch.optim.Adam",
    torch.optim.Muon: "its update of a number depends on the whole matrix; use torch.optim.AdamW",
    torch.optim.Adafactor: "its update of a number depends on whole rows and columns; use torch.optim.AdamW",
}
# torch's foreach formulas of these round otherwise than the ones that it takes by default on a CPU.
_OTHER_BITS_WITH_FOREACH = (torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam)


def describe(optimizer: Optimizer) -> Elementwise:
    """The description of the optimizer's class: its own `elementwise` (not an inherited one, whose formula may be another), or the table's.

    Raises UserError, saying why and what to do, where there is none.
    """
    kind = type(optimizer)
    found = vars(kind).get("elementwise", OPTIMIZERS.get(kind))
    if isinstance(found, Elementwise):
        return found
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind in _REFUSED:
        raise UserError(f"the optimizer torch.optim.{kind.__name__} is not supported: {_REFUSED[kind]}")
    if found is not None:
        raise UserError(f"{name}.elementwise is a {type(found).__name__}, expected a packhorse.Elementwise (see its documentation)")
    ancestor = next((base for base in kind.__mro__ if base in OPTIMIZERS or "elementwise" in vars(base)), None)
    same = f"; if its step is that of {ancestor.__name__}: {kind.__name__}.elementwise = {_spelled(ancestor)}" if ancestor else ""
    raise UserError(
        f"the optimizer {name} is not supported; use one of {', '.join('torch.optim.' + c.__name__ for c in OPTIMIZERS)} (exactly that class, not a "
        f"subclass), or, if it works element by element, say what it does: {kind.__name__}.elementwise = packhorse.Elementwise(...){same}"
    )


def _spelled(kind: type) -> str:
    """How a user writes the description of a class."""
    return f"packhorse.optim.OPTIMIZERS[torch.optim.{kind.__name__}]" if kind in OPTIMIZERS else f"{kind.__name__}.elementwise"


def check_settings(optimizer: Optimizer, described: Elementwise) -> None:
    """Raises UserError for settings of a group that a planned step cannot honour, and for states under names that it uses itself."""
    for index, group in enumerate(optimizer.param_groups):
        where = f"parameter group {index} of the optimizer"
        for flag in ("capturable", "differentiable"):
            if group.get(flag):
                raise UserError(f"{where} has {flag}=True, which a planned step cannot honour; make it with {flag}=False")
        if group.get("foreach") and type(optimizer) in _OTHER_BITS_WITH_FOREACH:
            raise UserError(
                f"{where} has foreach=True, with which torch.optim.{type(optimizer).__name__} rounds otherwise than without; a planned step rounds "
                "as without: make it with foreach=False"
            )
        if is_fused(group) and described.fused is None:
            raise UserError(f"{where} has fused=True, but {type(optimizer).__name__}.elementwise has no fused formula; set fused=False")
        needs = described.needs_of(group)
        names = [*needs.states, *needs.numbers]
        wrong = [name for name in names if name in ("param", "grad") or names.count(name) > 1 or (name == "step" and name in needs.states)]
        if wrong:
            raise UserError(
                f"{type(optimizer).__name__}.elementwise needs a state called {wrong[0]!r}, which is taken; "
                "call it otherwise (a step count is one of the numbers)"
            )
        if len(needs.states) + len(needs.kept_numbers) > MAX_STATES:
            raise UserError(
                f"{type(optimizer).__name__}.elementwise keeps {len(names)} states and numbers a parameter; at most {MAX_STATES} are possible, "
                "a step count among them"
            )
