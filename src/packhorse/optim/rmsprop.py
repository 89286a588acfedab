"""RMSprop. Tieleman and Hinton 2012, lecture 6.5; centered, Graves 2013, eqs. 38-45."""

import torch
from torch import Tensor

from packhorse.optim.elementwise import Elementwise, Group, Needs, number


def _needs(group: Group) -> Needs:
    buffer = {"momentum_buffer": 0.0} if group["momentum"] > 0 else {}
    mean = {"grad_avg": 0.0} if group["centered"] else {}
    changes = bool(group["maximize"] or group["weight_decay"] != 0)
    return Needs({"square_avg": 0.0} | buffer | mean, {"step": 0.0}, 1, changes)


def _step(param: Tensor, grad: Tensor, state: dict[str, Tensor], count: float, group: Group, space: list[Tensor]) -> None:
    lr, alpha, squares = number(group["lr"]), group["alpha"], state["square_avg"]
    if group["maximize"]:
        grad.neg_()
    if group["weight_decay"] != 0:
        grad.add_(param, alpha=group["weight_decay"])
    squares.mul_(alpha).addcmul_(grad, grad, value=1 - alpha)
    if group["centered"]:
        mean = state["grad_avg"].lerp_(grad, 1 - alpha)
        root = torch.addcmul(squares, mean, mean, value=-1, out=space[0]).sqrt_()
    else:
        root = torch.sqrt(squares, out=space[0])
    root.add_(group["eps"])
    if group["momentum"] > 0:
        buffer = state["momentum_buffer"].mul_(group["momentum"]).addcdiv_(grad, root)
        param.add_(buffer, alpha=-lr)
    else:
        param.addcdiv_(grad, root, value=-lr)


RMSPROP = Elementwise(_step, _needs)
