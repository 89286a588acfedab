"""Adagrad. Duchi, Hazan and Singer 2011, Figure 1, with diagonal matrices."""

import torch
from torch import Tensor

from packhorse.optim.elementwise import Elementwise, Group, Needs, number


def _needs(group: Group) -> Needs:
    changes = bool(group["maximize"] or group["weight_decay"] != 0)
    return Needs({"sum": group["initial_accumulator_value"]}, {"step": 0.0}, 1, changes)


def _step(param: Tensor, grad: Tensor, state: dict[str, Tensor], count: float, group: Group, space: list[Tensor]) -> None:
    total = state["sum"]
    if group["maximize"]:
        grad.neg_()
    if group["weight_decay"] != 0:
        grad.add_(param, alpha=group["weight_decay"])
    rate = number(group["lr"]) / (1 + (count - 1) * group["lr_decay"])
    total.addcmul_(grad, grad, value=1)
    root = torch.sqrt(total, out=space[0]).add_(group["eps"])
    param.addcdiv_(grad, root, value=-rate)


def _fused(params: list[Tensor], grads: list[Tensor], state: dict[str, list[Tensor]], count: float, group: Group) -> None:
    torch._fused_adagrad_(
        params, grads, state["sum"], state["step"], lr=group["lr"], lr_decay=group["lr_decay"],
        weight_decay=group["weight_decay"], eps=group["eps"], maximize=group["maximize"],
    )  # fmt: skip


ADAGRAD = Elementwise(_step, _needs, _fused)
