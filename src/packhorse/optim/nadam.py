"""NAdam: Adam with Nesterov momentum. Dozat 2016, Algorithm 2."""

import torch
from torch import Tensor

from packhorse.optim.elementwise import Elementwise, Group, Needs, number


def _needs(group: Group) -> Needs:
    changes = bool(group["maximize"] or (group["weight_decay"] != 0 and not group["decoupled_weight_decay"]))
    return Needs({"exp_avg": 0.0, "exp_avg_sq": 0.0}, {"step": 0.0, "mu_product": 1.0}, 1, changes)


def _step(param: Tensor, grad: Tensor, state: dict[str, Tensor], count: float, group: Group, space: list[Tensor]) -> None:
    lr, decay, fall = number(group["lr"]), group["weight_decay"], group["momentum_decay"]
    (beta1, beta2), product = group["betas"], state["mu_product"]
    first, second = state["exp_avg"], state["exp_avg_sq"]
    if group["maximize"]:
        grad.neg_()
    if decay != 0 and group["decoupled_weight_decay"]:
        param.mul_(1 - lr * decay)
    elif decay != 0:
        grad.add_(param, alpha=decay)
    mu = beta1 * (1.0 - 0.5 * (0.96 ** (count * fall)))
    following = beta1 * (1.0 - 0.5 * (0.96 ** ((count + 1) * fall)))
    product.mul_(mu)
    first.lerp_(grad, 1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = torch.div(second, 1 - beta2**count, out=space[0]).sqrt_().add_(group["eps"])
    so_far = product.item()
    param.addcdiv_(grad, root, value=-lr * (1.0 - mu) / (1.0 - so_far))
    param.addcdiv_(first, root, value=(-lr * following) / (1.0 - so_far * following))


NADAM = Elementwise(_step, _needs)
