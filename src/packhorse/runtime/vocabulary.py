"""Recipes (kernels.py) of operators on one rank's part of a vocabulary: rows of an embedding, columns of the logits.

A part begins at row or column `start` of the whole; of its columns the first `valid` are in the vocabulary, the rest is padding. V is its size,
T the number of tokens. Nothing here communicates: the sums over ranks are nodes of their own.

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3 (the embedding, and the cross entropy that sends b*s numbers instead of b*s*v).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from packhorse.graph.operators import loss_rows

aten = torch.ops.aten


def _carved(scratch: Tensor, *parts: tuple[int, torch.dtype]) -> list[Tensor]:
    """Flat tensors of (elements, dtype), one after another; the wide dtypes come first, so that all are aligned."""
    found, at = [], 0
    for elements, dtype in parts:
        size = elements * dtype.itemsize
        found.append(scratch[at : at + size].view(dtype))
        at += size
    return found


def _find(indices: Tensor, start: int, count: int, local: Tensor, elsewhere: Tensor) -> None:
    """local: where an index stands in the part [start, start + count), some place in it for those that do not; elsewhere: they do not."""
    local.view(indices.shape).copy_(indices)
    local.sub_(start).clamp_(0, count - 1).add_(start)
    torch.ne(local.view(indices.shape), indices, out=elsewhere.view(indices.shape))
    local.sub_(start)


def _check(indices: Tensor, size: int) -> None:
    """Raises IndexError as the operators on a whole vocabulary do, which on a GPU do it elsewhere."""
    if indices.numel() and not indices.is_cuda:
        low, high = (int(bound) for bound in torch.aminmax(indices))
        if low < 0 or high >= size:
            raise IndexError(f"index {low if low < 0 else high} is outside of the vocabulary, [0, {size})")


# -- the embedding ---------------------------------------------------------------------------------------------------------------------------


def part_embedding(outs, scratch, weight: Tensor, indices: Tensor, start: int, size: int | None = None) -> None:
    """(V, H), (...) -> (..., H): zero rows for indices of other ranks.

    size: of the whole vocabulary; an index outside of it raises IndexError. Without it no rank can tell such an index from another rank's.
    """
    if indices.numel() == 0:
        return
    if size is not None:
        _check(indices, size)
    local, elsewhere = _carved(scratch, (indices.numel(), torch.int64), (indices.numel(), torch.bool))
    _find(indices, start, len(weight), local, elsewhere)
    rows = outs[0].view(-1, weight.shape[1])
    torch.index_select(weight, 0, local, out=rows)
    rows.masked_fill_(elsewhere[:, None], 0)


def part_embedding_backward(outs, scratch, grad: Tensor, indices: Tensor, num_rows: int, padding_idx: int, start: int) -> None:
    """(..., H) -> (V, H), V = num_rows: each row added to its token's, in the order of the tokens; the padding token's row is zero.

    padding_idx counts in the whole vocabulary; -1 for none.
    """
    out = outs[0].zero_()
    if grad.numel() == 0:
        return
    scratch[-1:].zero_()  # the arena's canary sees how far it reaches, however few rows there are
    if _by_operator(out):
        out.copy_(_whole_rows(grad, indices, num_rows, padding_idx, start))
        return
    rows, tokens = _own_tokens(indices, num_rows, padding_idx, start)
    _add_rows(out, rows, grad.reshape(-1, grad.shape[-1]), tokens, scratch.view(grad.dtype).view(-1, grad.shape[-1]))


def add_part_embedding_backward(outs, scratch, total: Tensor, grad: Tensor, indices: Tensor, num_rows: int, padding_idx: int, start: int) -> None:
    """The same added to `total` (V, H), which may be the result's own memory; rows are summed up first (graph/embedding_rows.py)."""
    out = outs[0] if outs[0].data_ptr() == total.data_ptr() else outs[0].copy_(total)
    if grad.numel() == 0:
        return
    scratch[-1:].zero_()  # as above
    if _by_operator(out):
        out.add_(_whole_rows(grad, indices, num_rows, padding_idx, start))
        return
    rows, tokens = _own_tokens(indices, num_rows, padding_idx, start)
    touched, place = torch.unique(rows, return_inverse=True)
    space = scratch.view(grad.dtype).view(-1, grad.shape[-1])
    sums, chunk = space[: len(touched)].zero_(), space[len(touched) :]
    _add_rows(sums, place, grad.reshape(-1, grad.shape[-1]), tokens, chunk)
    out.index_add_(0, touched, sums)


def _own_tokens(indices: Tensor, num_rows: int, padding_idx: int, start: int) -> tuple[Tensor, Tensor]:
    """Row in this part, and number, of each token that has one and is not the padding token; in the order of the tokens."""
    local = indices.reshape(-1) - start
    own = (local >= 0) & (local < num_rows)
    if padding_idx >= 0:
        own &= local != padding_idx - start
    tokens = own.nonzero().squeeze(1)
    return local[tokens], tokens


def _add_rows(target: Tensor, rows: Tensor, grad: Tensor, tokens: Tensor, chunk: Tensor) -> None:
    """target[rows[k]] += grad[tokens[k]] for each k in order; the rows of tokens are brought together in a chunk of scratch."""
    for some, found in zip(tokens.split(len(chunk)), rows.split(len(chunk))):
        target.index_add_(0, found, torch.index_select(grad, 0, some, out=chunk[: len(some)]))


def _by_operator(out: Tensor) -> bool:
    """16-bit rows are added up in another precision by PyTorch's own operator; on a GPU index_add_ adds in no fixed order."""
    return out.is_cuda or out.element_size() < 4


def _whole_rows(grad: Tensor, indices: Tensor, num_rows: int, padding_idx: int, start: int) -> Tensor:
    """By PyTorch's own operator: tokens of other ranks are the padding token of a vocabulary of one row more."""
    local = indices - start
    own = (local >= 0) & (local < num_rows) & ((indices != padding_idx) | (padding_idx < 0))
    return aten.embedding_dense_backward(grad, torch.where(own, local, num_rows), num_rows + 1, num_rows, False)[:num_rows]


# -- the loss --------------------------------------------------------------------------------------------------------------------------------


def vocab_stats(outs, scratch, x: Tensor, target: Tensor | None, start: int, valid: int) -> None:
    """Logits (T, V), target (T,) in the whole vocabulary -> (3, T): of each row the maximum, the sum of exp(x - maximum), and the target's logit, or
    0 where another rank has it. In chunks of rows. A part that is all padding gives (-infinity, 0, 0), and so does a row of -infinity."""
    top, total, picked = outs[0].unbind(0)
    if valid == 0:
        top.fill_(-torch.inf)
        total.zero_()
    if valid == 0 or target is None:
        picked.zero_()
    if x.numel() == 0:
        return
    if valid == 0:
        scratch[-1:].zero_()  # the arena's canary sees how far it reaches, whatever a rank has of the vocabulary
        return
    width = x.shape[1]
    step = loss_rows(len(x), width * x.element_size())
    local, shifted, truth = _carved(scratch, (step, torch.int64), (step * width, x.dtype), (step, torch.bool))
    for begin in range(0, len(x), step):
        part, here = x[begin : begin + step, :valid], slice(begin, min(begin + step, len(x)))
        some = slice(0, len(part))
        torch.amax(part, 1, out=top[here])
        chunk = torch.sub(part, top[here, None], out=shifted[: step * valid].view(step, valid)[some])
        torch.sum(chunk.exp_(), 1, out=total[here])
        total[here].masked_fill_(torch.eq(top[here], -torch.inf, out=truth[some]), 0)
        if target is not None:
            _find(target[here], start, valid, local[some], truth[some])
            torch.gather(part, 1, local[some, None], out=picked[here, None])
            picked[here].masked_fill_(truth[some], 0)


def vocab_merge(outs, scratch, stats: Tensor) -> None:
    """vocab_stats of all ranks (ranks, 3, T) -> log-sum-exp over the whole vocabulary (T,), the target's logit (T,).

    lse = max_r m_r + log sum_r s_r exp(m_r - max_r m_r). NaN only where log-softmax is: in a row that is -infinity throughout, or has +infinity.
    """
    lse, picked = outs
    if lse.numel() == 0:
        return
    space = scratch.view(stats.dtype).view(len(stats), -1)
    torch.amax(stats[:, 0], 0, out=lse)
    torch.sub(stats[:, 0], lse, out=space).exp_().mul_(stats[:, 1])
    torch.sum(space, 0, out=picked)
    lse.add_(picked.log_())
    torch.sum(stats[:, 2], 0, out=picked)


def vocab_log_probs(outs, scratch, x: Tensor, lse: Tensor, valid: int) -> None:
    """(T, V), (T,) -> (T, V), which may be x's own memory: log-probabilities; -infinity in the padding."""
    torch.sub(x, lse[:, None], out=outs[0])
    outs[0][:, valid:].fill_(-torch.inf)


def _labels(target: Tensor, ignore_index: int, labels: Tensor, ignored: Tensor) -> None:
    """labels: the targets, 0 where they are ignored."""
    torch.eq(target, ignore_index, out=ignored)
    labels.copy_(target).masked_fill_(ignored, 0)


def vocab_nll(outs, scratch, lse, picked, target, weight, reduction: int, ignore_index: int, size: int | None = None) -> None:
    """(T,), (T,), (T,), weight (classes,) or None -> loss, total weight: the negative log-likelihood of log-probabilities picked - lse.

    reduction: 0 none, 1 mean, 2 sum. size: as in part_embedding.
    """
    loss, total = outs
    rows, dtype = len(target), lse.dtype
    if rows == 0:
        aten.nll_loss_forward.output(lse[:, None], target, None, reduction, ignore_index, output=loss, total_weight=total)
        return
    labels, log_probs, weights, ignored = _carved(scratch, (rows, torch.int64), (rows, dtype), (rows, dtype), (rows, torch.bool))
    _labels(target, ignore_index, labels, ignored)
    if size is not None:
        _check(labels, size)
    torch.sub(picked, lse, out=log_probs)
    if weight is not None:
        torch.index_select(weight, 0, labels, out=weights)
        log_probs.mul_(weights)
    # PyTorch's own operator on one class, so that rows are added up in its order; a label of -1 is left out
    labels.zero_().masked_fill_(ignored, -1)
    of_rows = min(2 * reduction, 2) if weight is not None else reduction
    aten.nll_loss_forward.output(log_probs[:, None], labels, None, of_rows, -1, output=loss, total_weight=total)
    if weight is not None and reduction:
        torch.sum(weights.masked_fill_(ignored, 0), 0, out=total)
        if reduction == 1:
            loss.div_(total)


def vocab_nll_backward(outs, scratch, grad_output, log_probs, target, weight, reduction: int, ignore_index: int, total_weight, start: int) -> None:
    """log_probs (T, V), target (T,) -> gradient of the logits (T, V), which may be log_probs' own memory; 0 where log_probs are -infinity.

    With g the gradient of a row's log-probability at its target: exp(log_probs) * -g, and g more at the target. In chunks of rows.
    """
    rows, columns = log_probs.shape
    if rows == 0:
        return
    out, dtype = outs[0], log_probs.dtype
    labels, slope, other, truth = _carved(scratch, (rows, torch.int64), (rows, dtype), (rows, dtype), (rows, torch.bool))
    _labels(target, ignore_index, labels, truth)
    if weight is not None:
        torch.index_select(weight, 0, labels, out=other)
    # PyTorch's own operator on one class: what it makes of reduction and total weight
    labels.zero_().masked_fill_(truth, -1)
    aten.nll_loss_backward.grad_input(grad_output, log_probs[:, :1], labels, None, reduction, -1, total_weight, grad_input=slope[:, None])
    if weight is not None:
        slope.mul_(other)
    torch.neg(slope, out=other)
    step = loss_rows(rows, columns * log_probs.element_size())
    for begin in range(0, rows, step):
        here = slice(begin, begin + step)
        torch.exp(log_probs[here], out=out[here]).mul_(other[here, None])
    _find(target, start, columns, labels, truth)
    out.scatter_add_(1, labels[:, None], slope.masked_fill_(truth, 0)[:, None])


VOCABULARY_RECIPES: dict[str, Callable[..., Any]] = {
    f"packhorse.{recipe.__name__}.default": recipe
    for recipe in (
        part_embedding,
        part_embedding_backward,
        add_part_embedding_backward,
        vocab_stats,
        vocab_merge,
        vocab_log_probs,
        vocab_nll,
        vocab_nll_backward,
    )
}
