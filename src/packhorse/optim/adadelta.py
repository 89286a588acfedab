"""Adadelta. Zeiler 2012, Algorithm 1."""

import torch
from torch import Tensor

from packhorse.optim.elementwise import Elementwise, Group, Needs, number


def _needs(group: Group) -> Needs:
    changes = bool(group["maximize"] or group["weight_decay"] != 0)
    return Needs({"square_avg": 0.0, "acc_delta": 0.0}, {"step": 0.0}, 2, changes)


def _step(param: Tensor, grad: Tensor, state: dict[str, Tensor], count: float, group: Group, space: list[Tensor]) -> None:
    squares, changes, rho, eps = state["square_avg"], state["acc_delta"], group["rho"], group["eps"]
    if group["maximize"]:
        grad.neg_()
    if group["weight_decay"] != 0:
        grad.add_(param, alpha=group["weight_decay"])
    squares.mul_(rho).addcmul_(grad, grad, value=1 - rho)
    root = torch.add(squares, eps, out=space[0]).sqrt_()
    change = torch.add(changes, eps, out=space[1]).sqrt_()
    change.div_(root).mul_(grad)
    changes.mul_(rho).addcmul_(change, change, value=1 - rho)
    param.add_(change, alpha=-number(group["lr"]))


ADADELTA = Elementwise(_step, _needs)
