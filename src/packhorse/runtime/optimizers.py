"""Optimizer kernels on runs of flat storage, with torch.optim's own order of operations.

A fused optimizer works through a run in chunks that fit a core's cache; the unfused formulas take one parameter at a time
(graph/operators.py, `update_batches`, says why). A gradient is scaled by the clip coefficient as it is used, so that the unclipped
gradients stay; temporaries lie in planned scratch. The numbers of the parameter group (`hyper`) are read at every step.
Formulas: Adam, Kingma & Ba 2015, Algorithm 1; decoupled weight decay, Loshchilov & Hutter 2019, Algorithm 2.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from packhorse.graph.operators import update_batches


def _temporaries(scratch: Tensor | None, like: Tensor, number: int) -> list[Tensor]:
    """The scratch as `number` typed parts of equal size."""
    return [] if scratch is None or number == 0 else list(scratch.view(like.dtype).chunk(number))


def _scaled(grad: Tensor, coefficient: Tensor | None, negate: bool, space: list[Tensor]) -> Tensor:
    """The gradient, scaled and negated as asked, in the first temporary; the gradient itself if neither."""
    if coefficient is not None:
        grad = torch.mul(grad, coefficient, out=space[0][: grad.numel()])
    if negate:
        grad = torch.neg(grad, out=space[0][: grad.numel()])
    return grad


def _adam(scratch, param, grad, exp_avg, exp_avg_sq, step, largest, coefficient, hyper, fused: bool, decoupled: bool, pieces, temporaries) -> None:
    lr, (beta1, beta2), eps = float(hyper["lr"]), hyper["betas"], hyper["eps"]
    decay, maximize = hyper["weight_decay"], hyper["maximize"]
    space = _temporaries(scratch, param, temporaries)
    step += 1
    count = step[0].item()
    if fused:
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        for batch in update_batches(pieces, True, temporaries, param.element_size()):
            start, end = batch[0][0], batch[-1][1]
            scaled = _scaled(grad[start:end], coefficient, False, space)
            grads = [scaled[a - start : b - start] for a, b in batch]
            moments = [[run[a:b] for a, b in batch] for run in (param, exp_avg, exp_avg_sq)]
            maxima = [] if largest is None else [largest[a:b] for a, b in batch]
            kernel(
                moments[0], grads, moments[1], moments[2], maxima, [step[0]] * len(batch), lr=lr, beta1=beta1, beta2=beta2,
                weight_decay=decay, eps=eps, amsgrad=largest is not None, maximize=maximize,
            )  # fmt: skip
        return
    for ((start, end),) in update_batches(pieces, False, temporaries, param.element_size()):
        p, m, v = param[start:end], exp_avg[start:end], exp_avg_sq[start:end]
        g = _scaled(grad[start:end], coefficient, maximize, space)
        if decay != 0 and decoupled:
            p.mul_(1 - lr * decay)
        elif decay != 0:
            g = torch.add(g, p, alpha=decay, out=space[0][: end - start])
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        if largest is not None:
            torch.maximum(largest[start:end], v, out=largest[start:end])
        root = torch.sqrt(v if largest is None else largest[start:end], out=space[-1][: end - start])
        root.div_((1 - beta2**count) ** 0.5).add_(eps)
        p.addcdiv_(m, root, value=-(lr / (1 - beta1**count)))


def adam(outs, scratch, param, grad, exp_avg, exp_avg_sq, step, coefficient, *, hyper, **options: Any) -> None:
    """One step of Adam or AdamW on a run: every tensor (N,), step (parameters,), coefficient a scalar or None."""
    _adam(scratch, param, grad, exp_avg, exp_avg_sq, step, None, coefficient, hyper, **options)


def adam_amsgrad(outs, scratch, param, grad, exp_avg, exp_avg_sq, step, max_exp_avg_sq, coefficient, *, hyper, **options: Any) -> None:
    """The same with the running maximum of the second moment (AMSGrad)."""
    _adam(scratch, param, grad, exp_avg, exp_avg_sq, step, max_exp_avg_sq, coefficient, hyper, **options)


def sgd_momentum(
    outs, scratch, param, grad, buffer: Tensor | None, step: Tensor | None, coefficient, *, hyper, fused: bool, pieces, temporaries
) -> None:
    """One step of SGD on a run: every tensor (N,). At step 0 the momentum buffer takes the gradient itself."""
    lr, momentum, decay, maximize = float(hyper["lr"]), hyper["momentum"], hyper["weight_decay"], hyper["maximize"]
    dampening, nesterov = hyper["dampening"], hyper["nesterov"]
    space = _temporaries(scratch, param, temporaries)
    first = step is not None and step[0].item() == 0
    if step is not None:
        step += 1
    if fused:
        for batch in update_batches(pieces, True, temporaries, param.element_size()):
            start, end = batch[0][0], batch[-1][1]
            scaled = _scaled(grad[start:end], coefficient, False, space)
            torch._fused_sgd_(
                [param[a:b] for a, b in batch], [scaled[a - start : b - start] for a, b in batch],
                [] if buffer is None else [buffer[a:b] for a, b in batch], weight_decay=decay, momentum=momentum, lr=lr,
                dampening=dampening, nesterov=nesterov, maximize=maximize, is_first_step=first,
            )  # fmt: skip
        return
    for ((start, end),) in update_batches(pieces, False, temporaries, param.element_size()):
        p = param[start:end]
        g = _scaled(grad[start:end], coefficient, maximize, space)
        if decay != 0:
            g = torch.add(g, p, alpha=decay, out=space[0][: end - start])
        if buffer is not None:
            b = buffer[start:end]
            if first:
                b.copy_(g)
            else:
                b.mul_(momentum).add_(g, alpha=1 - dampening)
            g = torch.add(g, b, alpha=momentum, out=space[0][: end - start]) if nesterov else b
        p.add_(g, alpha=-lr)


def sgd(outs, scratch, param, grad, coefficient, *, hyper, **options: Any) -> None:
    """SGD without momentum."""
    sgd_momentum(outs, scratch, param, grad, None, None, coefficient, hyper=hyper, **options)


OPTIMIZER_RECIPES: dict[str, Callable[..., Any]] = {
    "packhorse.adam.default": adam,
    "packhorse.adam_amsgrad.default": adam_amsgrad,
    "packhorse.sgd.default": sgd,
    "packhorse.sgd_momentum.default": sgd_momentum,
}
