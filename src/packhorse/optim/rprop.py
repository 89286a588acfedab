"""Rprop. Riedmiller and Braun 1993, section II, without weight backtracking."""

import torch
from torch import Tensor

from packhorse.optim.elementwise import Elementwise, Group, Needs


def _needs(group: Group) -> Needs:
    """Every element's first step has the size of the learning rate that the group has then."""
    return Needs({"prev": 0.0, "step_size": float(group["lr"])}, {"step": 0.0}, 2, changes_grad=True)


def _step(param: Tensor, grad: Tensor, state: dict[str, Tensor], count: float, group: Group, space: list[Tensor]) -> None:
    (shrink, grow), (least, most) = group["etas"], group["step_sizes"]
    previous, size, factor = state["prev"], state["step_size"], space[1]
    where = space[0].view(torch.bool)[: grad.numel()]
    if group["maximize"]:
        grad.neg_()
    torch.mul(grad, previous, out=factor).sign_()
    factor.masked_fill_(torch.gt(factor, 0, out=where), grow)
    factor.masked_fill_(torch.lt(factor, 0, out=where), shrink)
    factor.masked_fill_(torch.eq(factor, 0, out=where), 1)
    size.mul_(factor).clamp_(least, most)
    grad.masked_fill_(torch.eq(factor, shrink, out=where), 0)  # where the sign has turned this step is left out
    param.addcmul_(torch.sign(grad, out=factor), size, value=-1)
    previous.copy_(grad)


RPROP = Elementwise(_step, _needs)
