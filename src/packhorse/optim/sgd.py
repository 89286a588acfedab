"""SGD with momentum and Nesterov's. Sutskever et al. 2013, section 2, in torch's form (the learning rate outside the buffer)."""

import torch
from torch import Tensor

from packhorse.optim.elementwise import Elementwise, Group, Needs, number


def _needs(group: Group) -> Needs:
    momentum = group["momentum"] != 0
    changes = group["maximize"] or group["weight_decay"] != 0 or (momentum and group["nesterov"])
    return Needs({"momentum_buffer": 0.0} if momentum else {}, changes_grad=bool(changes))


def _step(param: Tensor, grad: Tensor, state: dict[str, Tensor], count: float, group: Group, space: list[Tensor]) -> None:
    """At the first step the momentum buffer takes the gradient itself, without dampening."""
    momentum, decay = group["momentum"], group["weight_decay"]
    if group["maximize"]:
        grad.neg_()
    if decay != 0:
        grad.add_(param, alpha=decay)
    if momentum != 0:
        buffer = state["momentum_buffer"]
        if count == 1:
            buffer.copy_(grad)
        else:
            buffer.mul_(momentum).add_(grad, alpha=1 - group["dampening"])
        grad = grad.add_(buffer, alpha=momentum) if group["nesterov"] else buffer
    param.add_(grad, alpha=-number(group["lr"]))


def _fused(params: list[Tensor], grads: list[Tensor], state: dict[str, list[Tensor]], count: float, group: Group) -> None:
    torch._fused_sgd_(
        params, grads, state.get("momentum_buffer", []), weight_decay=group["weight_decay"], momentum=group["momentum"], lr=group["lr"],
        dampening=group["dampening"], nesterov=group["nesterov"], maximize=group["maximize"], is_first_step=bool(count == 1),
    )  # fmt: skip


SGD = Elementwise(_step, _needs, _fused)
