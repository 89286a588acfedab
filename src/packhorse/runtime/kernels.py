"""How each operator of kind "out" (graph/operators.py) writes into planned memory without allocating: one recipe per operator.

A recipe is `recipe(outs, scratch, *args, **kwargs)`: outs are the planned results (None where the operator returns None), scratch a planned
byte tensor or None, the rest the operator's own arguments. Every recipe gives the operator's own bits. Operators without a recipe here use
their real `out=` overload: one that has a kernel of its own, since the generated ones allocate inside and copy.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from packhorse.capture.dtypes import LONG
from packhorse.graph.operators import HOST_CONVERT, HOST_FOLLOW, OWN_SLICE, follow_elements, loss_rows
from packhorse.runtime.optimizers import OPTIMIZER_RECIPES
from packhorse.runtime.random import save_random_state
from packhorse.runtime.vocabulary import VOCABULARY_RECIPES

aten = torch.ops.aten
Recipe = Callable[..., Any]


def copy_into(outs, scratch, x: Tensor, **_: Any) -> None:
    """clone, _to_copy: strides and dtype are those of the planned result."""
    outs[0].copy_(x)


def overwrite(outs, scratch, x: Tensor, source: Any, *_: Any) -> None:
    """copy and fill as functions: the result has the shape of x and the contents of the source."""
    if isinstance(source, Tensor):
        outs[0].copy_(source)
    else:
        outs[0].fill_(source)


def _own(out: Tensor, x: Tensor) -> Tensor:
    """The result with x's contents: a copy, unless it has taken over x's storage."""
    return out if out.data_ptr() == x.data_ptr() else out.copy_(x)


def masked_fill(outs, scratch, x: Tensor, mask: Tensor, value: Any) -> None:
    """x with `value` where the mask is set."""
    _own(outs[0], x).masked_fill_(mask, value)


def slice_scatter(outs, scratch, x: Tensor, source: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> None:
    """x with a slice of it replaced."""
    aten.slice.Tensor(_own(outs[0], x), dim, start, end, step).copy_(source)


def as_strided_scatter(outs, scratch, x: Tensor, source: Tensor, size: Any, stride: Any, offset: int | None = None) -> None:
    """The operator counts its offset from the start of the storage, which in planned memory is not where the result starts."""
    out = _own(outs[0], x)
    out.as_strided(size, stride, out.storage_offset() + (offset or 0)).copy_(source)


def select_scatter(outs, scratch, x: Tensor, source: Tensor, dim: int, index: int) -> None:
    """x with one index of a dim replaced."""
    _own(outs[0], x).select(dim, index).copy_(source)


def relu(outs, scratch, x: Tensor, *_: Any) -> None:
    """As eager's CPU kernel does it: a clamp at 0."""
    torch.clamp_min(x, 0, out=outs[0])


def safe_softmax(outs, scratch, x: Tensor, dim: int, dtype: Any = None) -> None:
    """Softmax, but zero in rows that are -infinity throughout (the operator itself needs a tensor of truth values as large as x)."""
    if x.numel() == 0:
        return
    if x.dim() == 0:  # one number: 1, or 0 for -infinity
        outs[0].copy_(x != -torch.inf)
        return
    largest = x.select(dim, 0).unsqueeze(dim)
    top = scratch[: largest.numel() * x.element_size()].view(x.dtype).view(largest.shape)
    masked = scratch[top.numel() * x.element_size() :][: top.numel()].view(torch.bool).view(largest.shape)
    torch.amax(x, dim, keepdim=True, out=top)
    torch.eq(top, -torch.inf, out=masked)
    torch.softmax(x, dim, dtype=dtype, out=outs[0])
    outs[0].masked_fill_(masked, 0.0)


def constant_pad(outs, scratch, x: Tensor, pad: tuple[int, ...], value: Any = 0) -> None:
    """pad: (before, after) of the last dim, of the one before it, ...; negative ones cut."""
    out = outs[0].fill_(value)
    inner = x
    for index in range(len(pad) // 2):
        before, after, dim = pad[2 * index], pad[2 * index + 1], x.dim() - 1 - index
        inner = inner.narrow(dim, max(-before, 0), x.shape[dim] + min(before, 0) + min(after, 0))
        out = out.narrow(dim, max(before, 0), inner.shape[dim])
    out.copy_(inner)


def index_put(outs, scratch, x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> None:
    """x with values put, or added, at the indices."""
    aten.index_put_(_own(outs[0], x), indices, values, accumulate)


def uninitialised(outs, scratch, *_: Any, **__: Any) -> None:
    """empty and its kin: whatever lies there. Its last element is written, so that the arena's canary sees how far it reaches."""
    if outs[0].numel():
        outs[0][(-1,) * outs[0].dim()].zero_()


def rsub(outs, scratch, x: Tensor, other: Any, alpha: Any = 1) -> None:
    """other - alpha * x."""
    if alpha == 1 and x.dtype == outs[0].dtype:
        torch.neg(x, out=outs[0]).add_(other)
    else:
        outs[0].copy_(aten.rsub.Scalar(x, other, alpha))


def of_all(function: Callable) -> Recipe:
    """sum and mean of every element: those over an empty list of dims, which have an `out=` of their own."""

    def recipe(outs, scratch, x: Tensor, *, dtype: Any = None) -> None:
        function(x, [], False, dtype=dtype, out=outs[0])

    return recipe


def with_scalar(function: Callable) -> Recipe:
    """add, sub, mul, div of a tensor and a number: the Tensor overload wraps the number as eager does."""

    def recipe(outs, scratch, x: Tensor, other: Any, alpha: Any = 1) -> None:
        if alpha == 1:
            function(x, other, out=outs[0])
        else:
            function(x, other, alpha=alpha, out=outs[0])

    return recipe


def stack(outs, scratch, tensors: tuple[Tensor, ...], dim: int = 0) -> None:
    """Tensors of one shape, concatenated along a new dim."""
    torch.stack(tensors, dim, out=outs[0])


def fill(value: Any) -> Recipe:
    """zeros, ones and their *_like."""

    def recipe(outs, scratch, *args: Any, **kwargs: Any) -> None:
        outs[0].fill_(value)

    return recipe


def full(outs, scratch, size_or_like: Any, value: Any, **_: Any) -> None:
    """full, full_like: one value everywhere."""
    outs[0].fill_(value)


def new_full(outs, scratch, like: Tensor, size: Any, value: Any, **_: Any) -> None:
    """one value everywhere, dtype and device of another tensor."""
    outs[0].fill_(value)


def scalar_tensor(outs, scratch, value: Any, **_: Any) -> None:
    """A tensor of one number."""
    outs[0].fill_(value)


def arange(outs, scratch, *bounds: Any, **_: Any) -> None:
    """arange of one, two or three bounds."""
    start, end, step = {1: (0, bounds[0], 1), 2: (*bounds, 1)}.get(len(bounds), bounds[:3])
    aten.arange.start_out(start, end, step, out=outs[0])


def embedding(outs, scratch, weight: Tensor, indices: Tensor, *_: Any, **__: Any) -> None:
    """(V, H), (...) -> (..., H): rows gathered into the flattened result."""
    torch.index_select(weight, 0, indices.reshape(-1), out=outs[0].view(-1, weight.shape[1]))


def embedding_backward(outs, scratch, grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool) -> None:
    """(..., H) -> (V, H): each row added to its token's, in the order of the tokens; the padding token's row is zero."""
    target = outs[0]
    # 16-bit rows are added up in another precision by the operator's own kernel; on a GPU index_add_ adds in no fixed order
    if scale_grad_by_freq or target.is_cuda or target.element_size() < 4:
        target.copy_(aten.embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq))
        return
    target.zero_()
    target.index_add_(0, indices.reshape(-1), grad.reshape(-1, grad.shape[-1]))
    if padding_idx >= 0:
        target[padding_idx].zero_()


def add_embedding_backward(outs, scratch, total: Tensor, grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int) -> None:
    """See graph/embedding_rows.py. (V, H), (..., H), (...) -> (V, H), which may be total's own memory."""
    out = _own(outs[0], total)
    if grad.numel() == 0:
        return
    if out.is_cuda:
        out.add_(aten.embedding_dense_backward(grad, indices, num_weights, padding_idx, False))
        return
    rows, place = torch.unique(indices, return_inverse=True)
    scratch[-1:].zero_()  # the arena's canary sees how far it reaches, however few rows there are
    sums = scratch.view(grad.dtype)[: len(rows) * grad.shape[-1]].view(len(rows), -1).zero_()
    sums.index_add_(0, place.reshape(-1), grad.reshape(-1, grad.shape[-1]))
    if padding_idx >= 0:
        sums[rows == padding_idx] = 0
    out.index_add_(0, rows, sums)


def dropout(outs, scratch, x: Tensor, p: float, train: bool | None) -> None:
    """out = x * (mask / (1-p)), the mask drawn as booleans: one byte an element is kept, the same draws as eager's float mask.

    The quotient is rounded in the dtype of x, as F.dropout does it; the operator's own kernel rounds 1/(1-p) otherwise for some p.
    """
    out, mask = outs
    if train is False or p == 0:
        out.copy_(x)
        mask.fill_(True)
        return
    if p == 1:
        torch.mul(x, 0, out=out)  # NaN where x is not finite, as eager has it
        mask.fill_(False)
        return
    if x.is_cuda:  # the fused kernel draws in an order of its own
        for target, result in zip(outs, aten.native_dropout(x, p, True)):
            target.copy_(result)
        return
    mask.bernoulli_(1 - p)
    out.copy_(mask)
    out.div_(1 - p)
    out.mul_(x)


def dropout_backward(outs, scratch, grad: Tensor, mask: Tensor, scale: float) -> None:
    """grad * (mask / (1-p)), as `dropout`; scale = 1/(1-p), or 0 for p = 1."""
    out = outs[0]
    out.copy_(mask)
    if grad.is_cuda or scale == 0:
        out.mul_(scale)
    else:
        out.div_(1 / scale)
    out.mul_(grad)


def slice_backward(outs, scratch, grad: Tensor, sizes: Any, dim: int, start: int, end: int, step: int) -> None:
    """Zeros with the gradient in the slice that was taken."""
    outs[0].zero_()
    aten.slice.Tensor(outs[0], dim, start, end, step).copy_(grad)


def select_backward(outs, scratch, grad: Tensor, sizes: Any, dim: int, index: int) -> None:
    """Zeros with the gradient at the index that was taken."""
    outs[0].zero_()
    outs[0].select(dim, index).copy_(grad)


def nll_log_softmax_backward(outs, scratch, grad_output, log_probs, target, weight, reduction, ignore_index, total_weight) -> None:
    """See graph/loss_rows.py. log_probs (T, V), target (T,) -> gradient of the logits (T, V), which may be log_probs' own memory."""
    rows, columns = log_probs.shape
    if rows == 0:
        return
    step = loss_rows(rows, columns * log_probs.element_size())
    chunk = scratch.view(log_probs.dtype).view(-1, columns)
    for start in range(0, rows, step):
        part = log_probs[start : start + step]
        grad = chunk[: part.shape[0]]
        aten.nll_loss_backward.grad_input(
            grad_output, part, target[start : start + step], weight, reduction, ignore_index, total_weight, grad_input=grad
        )
        aten._log_softmax_backward_data.out(grad, part, 1, part.dtype, out=outs[0][start : start + step])


def slow_convolution(outs, scratch, x: Tensor, weight: Tensor, kernel, bias, stride, padding) -> None:
    """(B, C, H, W), (K, C, h, w) -> (B, K, H', W')."""
    aten._slow_conv2d_forward.output(x, weight, kernel, bias, stride, padding, output=outs[0])


# Gradients that nobody wants are given as None, which only the kernels below these two keys take.
_BELOW_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView) | torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)


def slow_convolution_backward(outs, scratch, grad: Tensor, x: Tensor, weight: Tensor, kernel, stride, padding, mask) -> None:
    """Gradients of x, weight and bias, each where the mask asks for it."""
    with torch._C._ExcludeDispatchKeyGuard(_BELOW_AUTOGRAD):
        aten._slow_conv2d_backward.grad_input(grad, x, weight, kernel, stride, padding, grad_input=outs[0], grad_weight=outs[1], grad_bias=outs[2])


def batch_norm(outs, scratch, x, weight, bias, running_mean, running_var, training, momentum, eps) -> None:
    """Normalised x, saved mean and inverse deviation; the running statistics are updated where the last two results live."""
    out, mean, invstd, new_mean, new_var = outs
    for new, old in ((new_mean, running_mean), (new_var, running_var)):
        if new.data_ptr() != old.data_ptr():
            new.copy_(old)
    if x.element_size() < 4:  # the 16-bit kernel keeps statistics in a dtype of its own, which its out= overload does not accept
        for target, result in zip(outs[:3], aten.native_batch_norm(x, weight, bias, new_mean, new_var, training, momentum, eps)):
            target.copy_(result)
        return
    aten.native_batch_norm.out(x, weight, bias, new_mean, new_var, training, momentum, eps, out=out, save_mean=mean, save_invstd=invstd)


def batch_norm_again(outs, scratch, x, weight, bias, training, momentum, eps) -> None:
    """A mirror of batch norm in training: the same normalisation, without running statistics."""
    if x.element_size() < 4:
        for target, result in zip(outs, aten.native_batch_norm(x, weight, bias, None, None, True, momentum, eps)):
            target.copy_(result)
        return
    aten.native_batch_norm.out(x, weight, bias, None, None, True, momentum, eps, out=outs[0], save_mean=outs[1], save_invstd=outs[2])


def pieces_of(grads: Sequence[Tensor], dtypes: Sequence[str], pieces: Any) -> tuple[list[Tensor], list[str]]:
    """The pieces (first element, elements, _) of each flat gradient, and the dtype for each."""
    found = [(grad[start : start + count], name) for grad, name, some in zip(grads, dtypes, pieces, strict=True) for start, count, _ in some]
    return [piece for piece, _ in found], [name for _, name in found]


def grad_norm(outs, scratch, grads: Sequence[Tensor], dtypes: Sequence[str], pieces: Any = None) -> None:
    """The 2-norm of the 2-norms of gradients, or of pieces of flat ones, each taken in its own dtype of `dtypes` -> a scalar."""
    if pieces is not None:
        grads, dtypes = pieces_of(grads, dtypes, pieces)
    if not grads:
        outs[0].zero_()
        return
    begin = 64 * -(-8 * len(grads) // 64)
    norms, space = scratch[:begin].view(outs[0].dtype)[: len(grads)], scratch[begin:]
    for index, (grad, name) in enumerate(zip(grads, dtypes)):
        if grad.dtype != LONG[name]:
            bytes_ = space[: grad.numel() * LONG[name].itemsize]
            grad = bytes_.view(LONG[name]).view(grad.shape).copy_(grad)
        if grad.dtype == norms.dtype:
            torch.linalg.vector_norm(grad, out=norms[index])
        else:
            norms[index].copy_(torch.linalg.vector_norm(grad))
    torch.linalg.vector_norm(norms, out=outs[0])


def follow(outs, scratch, master: Tensor, copy: Tensor) -> None:
    """Master weights (N,), wide, where their narrow copies (N,) are still those of the master weights; elsewhere the copies, widened."""
    step = follow_elements(len(master))
    sizes = [step * master.element_size(), step * copy.element_size(), step]
    wide, narrow, differs = (
        part.view(dtype) for part, dtype in zip(scratch[: sum(sizes)].split(sizes), (master.dtype, copy.dtype, torch.bool), strict=True)
    )
    for start in range(0, len(master), step):
        kept, seen = outs[0][start : start + step], copy[start : start + step]
        n = len(kept)
        torch.ne(narrow[:n].copy_(kept), seen, out=differs[:n])
        torch.where(differs[:n], wide[:n].copy_(seen), kept, out=kept)  # outs[0] is master itself: operators.py, `updates`


def clip_coefficient(outs, scratch, norm: Tensor, max_norm: float) -> None:
    """min(1, max_norm / (norm + 1e-6)), rounded as torch.nn.utils.clip_grad_norm_ rounds it: a reciprocal, then a product."""
    out = outs[0]
    torch.add(norm, 1e-6, out=out)
    out.reciprocal_()
    out.mul_(max_norm)
    out.clamp_(max=1.0)


_SCALAR: dict[str, Recipe] = {f"aten.{n}.Scalar": with_scalar(getattr(torch, n)) for n in ("add", "sub", "mul", "div", "remainder", "fmod")}
_FILL: dict[str, Recipe] = {
    **{f"aten.{n}.default": fill(0) for n in ("zeros", "zeros_like", "new_zeros")},
    **{f"aten.{n}.default": fill(1) for n in ("ones", "ones_like", "new_ones")},
}


def own_slice(outs: Any, scratch: Any, x: Tensor, *, ranks: int, rank: int) -> None:
    """x (n,) -> the rank-th of `ranks` slices of ceil(n / ranks) elements; what is beyond the end of x is zero."""
    (out,) = outs
    own = x[rank * out.numel() : (rank + 1) * out.numel()]
    out[: own.numel()].copy_(own)
    out[own.numel() :].zero_()


RECIPES: dict[str, Recipe] = {
    **_SCALAR,
    **_FILL,
    "aten.relu.default": relu,
    "aten._safe_softmax.default": safe_softmax,
    "aten.constant_pad_nd.default": constant_pad,
    "aten.index_put.default": index_put,
    **dict.fromkeys(
        [f"aten.{n}" for n in ("empty.memory_format", "empty_like.default", "new_empty.default", "new_empty_strided.default")], uninitialised
    ),
    "aten.rsub.Scalar": rsub,
    "aten.sum.default": of_all(aten.sum.IntList_out),
    "aten.mean.default": of_all(aten.mean.out),
    "aten.clone.default": copy_into,
    "aten._to_copy.default": copy_into,
    "aten.lift_fresh_copy.default": copy_into,
    "aten.copy.default": overwrite,
    "aten.fill.Scalar": overwrite,
    "aten.masked_fill.Scalar": masked_fill,
    "aten.slice_scatter.default": slice_scatter,
    "aten.select_scatter.default": select_scatter,
    "aten.as_strided_scatter.default": as_strided_scatter,
    "aten.stack.default": stack,
    "aten.full.default": full,
    "aten.full_like.default": full,
    "aten.new_full.default": new_full,
    "aten.scalar_tensor.default": scalar_tensor,
    "aten.arange.default": arange,
    "aten.arange.start": arange,
    "aten.arange.start_step": arange,
    "aten.embedding.default": embedding,
    "aten.embedding_dense_backward.default": embedding_backward,
    "packhorse.add_embedding_backward.default": add_embedding_backward,
    "aten.native_dropout.default": dropout,
    "aten.native_dropout_backward.default": dropout_backward,
    "aten.slice_backward.default": slice_backward,
    "aten.select_backward.default": select_backward,
    "packhorse.nll_log_softmax_backward.default": nll_log_softmax_backward,
    "aten._slow_conv2d_forward.default": slow_convolution,
    "aten._slow_conv2d_backward.output_mask": slow_convolution_backward,
    "aten._native_batch_norm_legit_functional.default": batch_norm,
    "aten._native_batch_norm_legit.no_stats": batch_norm_again,
    "packhorse.random_state.default": save_random_state,
    "packhorse.follow.default": follow,
    HOST_FOLLOW: follow,
    HOST_CONVERT: copy_into,
    OWN_SLICE: own_slice,
    "packhorse.grad_norm.default": grad_norm,
    "packhorse.clip_coefficient.default": clip_coefficient,
    **OPTIMIZER_RECIPES,
    **VOCABULARY_RECIPES,
}


@cache
def overload(name: str) -> torch._ops.OpOverload:
    """The torch operator of a name such as "aten.mm.default"."""
    namespace, packet, kind = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), kind)


def takes_generator(name: str) -> bool:
    """The operator of a name has an argument for a generator: from the default one it draws where that is None."""
    return name.startswith("aten.") and any(argument.name == "generator" for argument in overload(name)._schema.arguments)


@cache
def out_overload(name: str) -> tuple[torch._ops.OpOverload, tuple[str, ...]]:
    """The `out=` overload with the same inputs, and the names of its out arguments in the order of the results."""
    op = overload(name)
    packet = getattr(torch.ops.aten, name.split(".")[1])
    wanted = [str(a.type) for a in op._schema.arguments]
    for kind in packet.overloads():
        schema = getattr(packet, kind)._schema
        outs = [a for a in schema.arguments if a.is_out]
        if len(outs) == len(op._schema.returns) and [str(a.type) for a in schema.arguments if not a.is_out] == wanted:
            return getattr(packet, kind), tuple(a.name for a in outs)
    raise LookupError(f"{name} has no out= overload: its row in graph/operators.py is wrong")


# Public functions of torch that take the same arguments as the operator of that name and an `out=`: a call costs half of one through torch.ops.
_DIRECT = (
    "abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc exp exp2 expm1 floor log log10 log1p log2 neg "
    "reciprocal round rsqrt sgn sigmoid sign sin sinh sqrt tan tanh trunc add sub mul div fmod remainder maximum "
    "minimum atan2 eq ne lt le gt ge logical_and logical_or logical_xor logical_not bitwise_and bitwise_or "
    "bitwise_xor bitwise_not pow where addcmul addcdiv mm bmm addmm baddbmm sum mean amax amin cat gather "
    "index_select tril triu"
).split()


@cache
def direct(name: str) -> tuple[Callable, tuple[str, ...]]:
    """The function that writes the operator's results into its out arguments, and their names; for operators without a recipe."""
    packet = name.split(".")[1]
    return (getattr(torch, packet), ("out",)) if packet in _DIRECT else out_overload(name)


def call_of(name: str, outs: Any, scratch: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Callable, tuple, dict[str, Any]]:
    """(function, args, kwargs) whose call writes the results of an operator of kind "out" or "copy" into `outs`."""
    if name in RECIPES:
        return RECIPES[name], (outs, scratch, *args), kwargs
    function, names = direct(name)
    return function, tuple(args), {**kwargs, **dict(zip(names, outs))}
