"""What packhorse must know of an optimizer: its formula on slices, and the memory that the formula needs.

One description serves torch.optim's classes (table.py) and yours. Yours stands on the class, beside the step() that plain PyTorch calls:

    class Lion(torch.optim.Optimizer):
        def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
            super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        state = self.state[param]
                        if not state:
                            state["exp_avg"] = torch.zeros_like(param)
                        lion(param, param.grad, state, 0, group, [torch.empty_like(param)])

    def lion(param, grad, state, count, group, space):
        (beta1, beta2), (update,) = group["betas"], space
        param.mul_(1 - group["lr"] * group["weight_decay"])
        torch.lerp(state["exp_avg"], grad, 1 - beta1, out=update)
        param.add_(update.sign_(), alpha=-group["lr"])
        state["exp_avg"].lerp_(grad, 1 - beta2)

    Lion.elementwise = packhorse.Elementwise(lion, packhorse.Needs(states={"exp_avg": 0.0}, temporaries=1))

Elementwise means: a new number depends on the old numbers at the same place alone, and on numbers that hold for the whole parameter. What needs a
norm, a row or a matrix of the parameter is not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

Group = dict[str, Any]
Formula = Callable[[Tensor, Tensor, dict[str, Tensor], float, Group, list[Tensor]], None]
FusedFormula = Callable[[list[Tensor], list[Tensor], dict[str, list[Tensor]], float, Group], None]


@dataclass(frozen=True)
class Needs:
    """What the formula needs for one parameter of a group.

    states: what is kept for each element, by name, and the value it starts at. They have the parameter's dtype.
    numbers: what is kept once a parameter, by name, and its start: 0-dim fp32 tensors. One called "step" is counted by packhorse.
    temporaries: number of temporaries of the parameter's size and dtype. The last of them is written at every step: a plan counts it as used.
    changes_grad: the formula writes to `grad`, which is then a copy; otherwise it may be the step's own gradient, for reading only.
    """

    states: Mapping[str, float] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    temporaries: int = 0
    changes_grad: bool = False

    @property
    def memory(self) -> tuple:
        """All of it but the start values: what a plan depends on."""
        return tuple(self.states), tuple(self.numbers), self.temporaries, self.changes_grad

    @property
    def kept_numbers(self) -> tuple[str, ...]:
        """`numbers`, and a "step" in any case where something is kept: it tells a parameter's first step from later ones."""
        return tuple(dict.fromkeys(["step", *self.numbers])) if self.states or self.numbers else ()


@dataclass(frozen=True)
class Elementwise:
    """An elementwise optimizer.

    step(param, grad, state, count, group, space): one step of one parameter, in place, allocating nothing. All tensors are flat, (N,), but for the
    numbers in `state`, which are 0-dim. `state` is what the optimizer's own state[param] would be. count: 1.0 at the parameter's first step; where
    "step" is one of the numbers it is the number of this step. group: the live parameter group. space: needs.temporaries tensors (N,) with
    arbitrary contents.

    needs: for every group, or a function of the group.

    fused(params, grads, state, count, group): one step of many slices at once, for groups with fused=True. Lists of equal length, of tensors (n,);
    state[name] is such a list too. It must not matter where in a slice an element stands, needs no temporaries and changes no gradient.
    """

    step: Formula
    needs: Needs | Callable[[Group], Needs] = field(default_factory=Needs)
    fused: FusedFormula | None = None

    def needs_of(self, group: Group) -> Needs:
        """What the step of one group needs."""
        needs = self.needs if isinstance(self.needs, Needs) else self.needs(group)
        return replace(needs, temporaries=0, changes_grad=False) if is_fused(group) else needs


def is_fused(group: Group) -> bool:
    """The group asks for its class's fused kernel."""
    return bool(group.get("fused"))


def number(value: Any) -> Any:
    """A setting of a group; where it is a tensor of one element, 0-dim, as torch.optim takes it."""
    return value.squeeze() if isinstance(value, Tensor) and value.dim() else value
