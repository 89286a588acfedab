"""NAdam: Adam with Nesterov momentum. Dozat 2016, Algorithm 2."""

import torch
from torch import Tensor

from packhorse.optim.adam import changes_grad, moments
from packhorse.optim.elementwise import Elementwise, Group, Needs, number


def _needs(group: Group) -> Needs:
    return Needs({"exp_avg": 0.0, "exp_avg_sq": 0.0}, {"step": 0.0, "mu_product": 1.0}, 1, changes_grad(group))


def _step(param: Tensor, grad: Tensor, state: dict[str, Tensor], count: float, group: Group, space: list[Tensor]) -> None:
    lr, fall = number(group["lr"]), group["momentum_decay"]
    (beta1, beta2), product = group["betas"], state["mu_product"]
    first, second = moments(param, grad, state, group)
    mu = beta1 * (1.0 - 0.5 * (0.96 ** (count * fall)))
    following = beta1 * (1.0 - 0.5 * (0.96 ** ((count + 1) * fall)))
    product.mul_(mu)
    root = torch.div(second, 1 - beta2**count, out=space[0]).sqrt_().add_(group["eps"])
    so_far = product.item()
    param.addcdiv_(grad, root, value=-lr * (1.0 - mu) / (1.0 - so_far))
    param.addcdiv_(first, root, value=(-lr * following) / (1.0 - so_far * following))


NADAM = Elementwise(_step, _needs)
