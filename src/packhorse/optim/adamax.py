"""Adamax. Kingma and Ba 2015, Algorithm 2."""

import torch
from torch import Tensor

from packhorse.optim.elementwise import Elementwise, Group, Needs, number


def _needs(group: Group) -> Needs:
    changes = bool(group["maximize"] or group["weight_decay"] != 0)
    return Needs({"exp_avg": 0.0, "exp_inf": 0.0}, {"step": 0.0}, 1, changes)


def _step(param: Tensor, grad: Tensor, state: dict[str, Tensor], count: float, group: Group, space: list[Tensor]) -> None:
    first, largest = state["exp_avg"], state["exp_inf"]
    beta1, beta2 = group["betas"]
    if group["maximize"]:
        grad.neg_()
    if group["weight_decay"] != 0:
        grad.add_(param, alpha=group["weight_decay"])
    first.lerp_(grad, 1 - beta1)
    size = torch.abs(grad, out=space[0]).add_(group["eps"])
    torch.maximum(largest.mul_(beta2), size, out=largest)
    param.addcdiv_(first, largest, value=-(number(group["lr"]) / (1 - beta1**count)))


ADAMAX = Elementwise(_step, _needs)
