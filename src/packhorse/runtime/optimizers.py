"""The optimizer kernel: the formula of an optimizer's class (packhorse/optim) on a run of flat storage.

A fused optimizer works through a run in chunks that fit a core's cache; the unfused formulas take one parameter at a time
(graph/operators.py, `update_batches`, says why). A gradient is converted, and scaled by the clip coefficient, as it is used, so that the
unclipped gradients stay; temporaries lie in planned scratch. The numbers of the parameter group are read at every step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packhorse.graph.operators import HOST_OPTIMIZE, MAX_STATES, update_batches
from packhorse.optim.elementwise import Elementwise, Group


@dataclass(frozen=True)
class LiveGroup:
    """One parameter group of the optimizer as it is now: loading a state exchanges the dicts themselves."""

    optimizer: torch.optim.Optimizer
    described: Elementwise
    index: int

    @property
    def settings(self) -> Group:
        return self.optimizer.param_groups[self.index]


def own(grad: Tensor, coefficient: Tensor | None, out: Tensor) -> Tensor:
    """A gradient, converted to the dtype of `out` and scaled, in `out`: all (n,)."""
    if coefficient is None:
        return out.copy_(grad)
    if grad.dtype is out.dtype:
        return torch.mul(grad, coefficient, out=out)
    return out.copy_(grad).mul_(coefficient)


def optimize(
    outs, scratch, param: Tensor, *rest: Any, hyper: LiveGroup, fused: bool, states, numbers, pieces, own_grad: bool, temporaries: int
) -> None:
    """One step of an optimizer on a run. rest: the states, each (N,) as param, the numbers, (parameters,), the gradient, the coefficient or None.

    states, numbers: names. pieces: (start, count, number of the parameter). own_grad: a gradient is used from a copy of its own in the last
    temporary.
    """
    *kept, grad, coefficient = rest
    runs, group = dict(zip(states, kept)), hyper.settings
    each = {name: run.unbind() for name, run in zip(numbers, kept[len(states) :])}
    counts = [0.0] * (1 + max((index for _, _, index in pieces), default=0))
    if "step" in each:
        steps = kept[len(states) + numbers.index("step")]
        steps += 1
        counts = steps.tolist()
    space = [] if scratch is None or temporaries == 0 else list(scratch.view(param.dtype).chunk(temporaries))
    for batch in update_batches(pieces, fused, temporaries, param.element_size()):
        start, end = batch[0][1], batch[-1][2]
        g = grad[start:end]
        if own_grad:
            g = own(g, coefficient, space[-1][: end - start])
        if fused:
            state: dict[str, list[Tensor]] = {name: [run[a:b] for _, a, b in batch] for name, run in runs.items()}
            state |= {name: [values[index] for index, _, _ in batch] for name, values in each.items()}
            assert hyper.described.fused is not None
            hyper.described.fused(
                [param[a:b] for _, a, b in batch], [g[a - start : b - start] for _, a, b in batch], state, counts[batch[0][0]], group
            )
        else:
            index = batch[0][0]
            one = {name: run[start:end] for name, run in runs.items()} | {name: values[index] for name, values in each.items()}
            hyper.described.step(param[start:end], g, one, counts[index], group, [t[: end - start] for t in space[: temporaries - own_grad]])


OPTIMIZER_RECIPES: dict[str, Callable[..., Any]] = {
    f"{name}{n}": optimize for name in ("packhorse.optimize.", HOST_OPTIMIZE) for n in range(MAX_STATES + 1)
}
