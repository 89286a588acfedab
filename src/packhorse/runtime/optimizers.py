"""Optimizer kernels on runs of flat storage, chunk by chunk, with torch.optim's own order of operations.

Each works through a run in chunks that fit a core's cache. A chunk's gradient is scaled by the clip coefficient as it is used, so that the
unclipped gradients stay; temporaries lie in planned scratch. The numbers of the parameter group (`hyper`) are read at every step.
Formulas: Adam, Kingma & Ba 2015, Algorithm 1; decoupled weight decay, Loshchilov & Hutter 2019, Algorithm 2.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from packhorse.graph.operators import UPDATE_CHUNK_BYTES


def _chunks(param: Tensor, pieces: tuple[tuple[int, int], ...] | None = None) -> Iterator[tuple[int, int]]:
    """[start, end) element ranges of at most one chunk; with `pieces` (start, count), none crosses from one tensor to the next."""
    size = UPDATE_CHUNK_BYTES // param.element_size()
    for first, count in pieces or ((0, param.numel()),):
        for start in range(first, first + count, size):
            yield start, min(start + size, first + count)


def _gradient(grad: Tensor, coefficient: Tensor | None, maximize: bool, scratch: Tensor) -> Tensor:
    """The chunk's gradient, scaled and negated as asked: the gradient itself if neither."""
    if coefficient is not None:
        grad = torch.mul(grad, coefficient, out=scratch[: grad.numel()])
    if maximize:
        grad = torch.neg(grad, out=scratch[: grad.numel()])
    return grad


def _halves(scratch: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    typed = scratch.view(like.dtype)
    half = typed.numel() // 2
    return typed[:half], typed[half:]


def _adam(outs, scratch, param, grad, exp_avg, exp_avg_sq, step, max_exp_avg_sq, coefficient, hyper, fused: bool, decoupled: bool) -> None:
    lr, (beta1, beta2), eps = float(hyper["lr"]), hyper["betas"], hyper["eps"]
    decay, maximize, amsgrad = hyper["weight_decay"], hyper["maximize"], max_exp_avg_sq is not None
    scaled, second = _halves(scratch, param)
    step += 1
    count = step.item()
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    for start, end in _chunks(param):
        p, m, v = param[start:end], exp_avg[start:end], exp_avg_sq[start:end]
        largest = max_exp_avg_sq[start:end] if amsgrad else None
        if fused:
            g = _gradient(grad[start:end], coefficient, False, scaled)
            kernel(
                [p], [g], [m], [v], [largest] if amsgrad else [], [step], lr=lr, beta1=beta1, beta2=beta2,
                weight_decay=decay, eps=eps, amsgrad=amsgrad, maximize=maximize,
            )  # fmt: skip
            continue
        g = _gradient(grad[start:end], coefficient, maximize, scaled)
        if decay != 0 and decoupled:
            p.mul_(1 - lr * decay)
        elif decay != 0:
            g = torch.add(g, p, alpha=decay, out=scaled[: end - start])
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        if amsgrad:
            torch.maximum(largest, v, out=largest)
        root = torch.sqrt(largest if amsgrad else v, out=second[: end - start])
        root.div_((1 - beta2**count) ** 0.5).add_(eps)
        p.addcdiv_(m, root, value=-(lr / (1 - beta1**count)))


def adam(outs, scratch, param, grad, exp_avg, exp_avg_sq, step, coefficient, *, hyper, fused, decoupled) -> None:
    """One step of Adam or AdamW on a run: every tensor (N,), step a scalar, coefficient a scalar or None."""
    _adam(outs, scratch, param, grad, exp_avg, exp_avg_sq, step, None, coefficient, hyper, fused, decoupled)


def adam_amsgrad(outs, scratch, param, grad, exp_avg, exp_avg_sq, step, max_exp_avg_sq, coefficient, *, hyper, fused, decoupled) -> None:
    """The same with the running maximum of the second moment (AMSGrad)."""
    _adam(outs, scratch, param, grad, exp_avg, exp_avg_sq, step, max_exp_avg_sq, coefficient, hyper, fused, decoupled)


def sgd_momentum(outs, scratch, param, grad, buffer: Tensor | None, step: Tensor | None, coefficient, *, hyper: Any, fused: bool, pieces) -> None:
    """One step of SGD on a run: every tensor (N,). At step 0 the momentum buffer takes the gradient itself."""
    lr, momentum, decay, maximize = float(hyper["lr"]), hyper["momentum"], hyper["weight_decay"], hyper["maximize"]
    dampening, nesterov = hyper["dampening"], hyper["nesterov"]
    scaled, _ = _halves(scratch, param)
    first = step is not None and step.item() == 0
    if step is not None:
        step += 1
    for start, end in _chunks(param, pieces):
        p, b = param[start:end], None if buffer is None else buffer[start:end]
        if fused:
            g = _gradient(grad[start:end], coefficient, False, scaled)
            torch._fused_sgd_(
                [p], [g], [] if b is None else [b], weight_decay=decay, momentum=momentum, lr=lr, dampening=dampening,
                nesterov=nesterov, maximize=maximize, is_first_step=first,
            )  # fmt: skip
            continue
        g = _gradient(grad[start:end], coefficient, maximize, scaled)
        if decay != 0:
            g = torch.add(g, p, alpha=decay, out=scaled[: end - start])
        if b is not None:
            if first:
                b.copy_(g)
            else:
                b.mul_(momentum).add_(g, alpha=1 - dampening)
            g = torch.add(g, b, alpha=momentum, out=scaled[: end - start]) if nesterov else b
        p.add_(g, alpha=-lr)


def sgd(outs, scratch, param, grad, coefficient, *, hyper: Any, fused: bool, pieces) -> None:
    """SGD without momentum."""
    sgd_momentum(outs, scratch, param, grad, None, None, coefficient, hyper=hyper, fused=fused, pieces=pieces)


OPTIMIZER_RECIPES = {
    "packhorse.adam.default": adam,
    "packhorse.adam_amsgrad.default": adam_amsgrad,
    "packhorse.sgd.default": sgd,
    "packhorse.sgd_momentum.default": sgd_momentum,
}
