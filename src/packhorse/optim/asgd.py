"""Averaged SGD. Polyak and Juditsky 1992; step sizes as Bottou's, in torch's form."""

import torch
from torch import Tensor

from packhorse.optim.elementwise import Elementwise, Group, Needs, number


def _needs(group: Group) -> Needs:
    """The first step is taken at the learning rate that the group has then. The gradient, once used, is the temporary of the average."""
    return Needs({"ax": 0.0}, {"step": 0.0, "eta": float(group["lr"]), "mu": 1.0}, changes_grad=True)


def _step(param: Tensor, grad: Tensor, state: dict[str, Tensor], count: float, group: Group, space: list[Tensor]) -> None:
    lr, lambd, mean, eta, mu = number(group["lr"]), group["lambd"], state["ax"], state["eta"], state["mu"]
    if group["maximize"]:
        grad.neg_()
    if group["weight_decay"] != 0:
        grad.add_(param, alpha=group["weight_decay"])
    rate = eta.item()
    param.mul_(1 - lambd * rate)
    param.add_(grad, alpha=-rate)
    if mu.item() != 1:
        mean.add_(torch.sub(param, mean, out=grad).mul_(mu))
    else:
        mean.copy_(param)
    eta.fill_(lr / ((1 + lambd * lr * count) ** group["alpha"]))
    mu.fill_(1 / max(1, count - group["t0"]))


ASGD = Elementwise(_step, _needs)
