"""Adam and AdamW. Kingma and Ba 2015, Algorithm 1; decoupled weight decay, Loshchilov and Hutter 2019, Algorithm 2; AMSGrad, Reddi et al. 2018."""

import torch
from torch import Tensor

from packhorse.optim.elementwise import Elementwise, Group, Needs, number


def changes_grad(group: Group) -> bool:
    """Whether `moments` writes to the gradient."""
    return bool(group["maximize"] or (group["weight_decay"] != 0 and not group["decoupled_weight_decay"]))


def moments(param: Tensor, grad: Tensor, state: dict[str, Tensor], group: Group) -> tuple[Tensor, Tensor]:
    """What Adam, NAdam and RAdam begin with: sign and weight decay, then both moments, which are returned. All tensors (N,)."""
    decay, (beta1, beta2) = group["weight_decay"], map(number, group["betas"])
    first, second = state["exp_avg"], state["exp_avg_sq"]
    if group["maximize"]:
        grad.neg_()
    if decay != 0 and group["decoupled_weight_decay"]:
        param.mul_(1 - number(group["lr"]) * decay)
    elif decay != 0:
        grad.add_(param, alpha=decay)
    first.lerp_(grad, 1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    return first, second


def _needs(group: Group) -> Needs:
    maxima = {"max_exp_avg_sq": 0.0} if group["amsgrad"] else {}
    return Needs({"exp_avg": 0.0, "exp_avg_sq": 0.0} | maxima, {"step": 0.0}, 1, changes_grad(group))


def _step(param: Tensor, grad: Tensor, state: dict[str, Tensor], count: float, group: Group, space: list[Tensor]) -> None:
    lr, (beta1, beta2) = number(group["lr"]), map(number, group["betas"])
    first, second = moments(param, grad, state, group)
    if group["amsgrad"]:
        second = torch.maximum(state["max_exp_avg_sq"], second, out=state["max_exp_avg_sq"])
    root = torch.sqrt(second, out=space[0])
    root.div_((1 - beta2**count) ** 0.5).add_(group["eps"])
    param.addcdiv_(first, root, value=-(lr / (1 - beta1**count)))


def _fused(params: list[Tensor], grads: list[Tensor], state: dict[str, list[Tensor]], count: float, group: Group) -> None:
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    beta1, beta2 = map(number, group["betas"])
    kernel(
        params, grads, state["exp_avg"], state["exp_avg_sq"], state.get("max_exp_avg_sq", []), state["step"], lr=group["lr"],
        beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=group["amsgrad"], maximize=group["maximize"],
    )  # fmt: skip


ADAM = Elementwise(_step, _needs, _fused)
