"""RAdam: Adam with a rectified variance. Liu et al. 2020, Algorithm 2."""

import torch
from torch import Tensor

from packhorse.optim.adam import changes_grad, moments
from packhorse.optim.elementwise import Elementwise, Group, Needs, number


def _needs(group: Group) -> Needs:
    return Needs({"exp_avg": 0.0, "exp_avg_sq": 0.0}, {"step": 0.0}, 2, changes_grad(group))


def _step(param: Tensor, grad: Tensor, state: dict[str, Tensor], count: float, group: Group, space: list[Tensor]) -> None:
    lr, (beta1, beta2) = number(group["lr"]), group["betas"]
    first, second = moments(param, grad, state, group)
    correction = 1 - beta2**count
    update = torch.div(first, 1 - beta1**count, out=space[1]).mul_(lr)
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * count * (beta2**count) / correction  # of the simple average that the exponential one stands for
    if length > 5.0:
        adaptive = torch.sqrt(second, out=space[0]).add_(group["eps"]).reciprocal_().mul_(correction**0.5)
        rectified = ((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)) ** 0.5
        update.mul_(adaptive).mul_(rectified)
    param.add_(update, alpha=-1.0)


RADAM = Elementwise(_step, _needs)
