"""The nodes of packhorse/parallel and packhorse/residency as calls of what runs beside the computation: what a program starts and waits for."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from packhorse.graph.operators import (
    ALL_GATHER,
    ALL_GATHER_OTHERS,
    ALL_REDUCE,
    REDUCE_SCATTER,
    TENSOR_GATHER,
    TENSOR_SUM,
    TO_HOST,
    WAIT,
    is_tensor_collective,
    tensor_shard,
)
from packhorse.program.program import Operand
from packhorse.runtime.copies import CopyEngine
from packhorse.runtime.transport import Transport, memory_order

Bound = tuple[Callable, tuple, dict[str, Any]]  # function, arguments, keyword arguments; operands are among the arguments


def call_of_collective(
    op: str, outputs: tuple, args: tuple, kwargs: dict[str, Any], transport: Transport | CopyEngine, scratch: Operand | None = None
) -> Bound:
    """The call of one node, and of one that starts a copy to the host or back. scratch: the bucket of what has it there."""
    tag = kwargs["tag"]
    if op == WAIT:
        return transport.wait, (tag,), {}
    if isinstance(transport, CopyEngine):
        return (transport.to_host if op == TO_HOST else transport.from_host), (tag, args[0], outputs[0]), {}
    if op == ALL_GATHER:
        return transport.start, (tag, transport.all_gather, args[0], outputs[0]), {}
    if op == ALL_GATHER_OTHERS:
        return transport.start, (tag, transport.all_gather_others, args[0], *outputs), {}
    if is_tensor_collective(op):
        return _of_tensor(op, outputs[0], args[0], tag, transport, scratch)
    *outs, bucket = outputs
    whole, everywhere = not op.startswith(REDUCE_SCATTER), op.startswith(ALL_REDUCE)

    def start(tensors: list[Tensor], outs: list[Tensor], bucket: Tensor) -> None:
        bucket[-1:].zero_()  # the arena's canary sees how far it reaches, also where this rank receives nothing
        if whole:  # in place: the results are what is reduced
            for tensor, out in zip(tensors, outs):
                if tensor.data_ptr() != out.data_ptr():
                    out.copy_(tensor)
            tensors = outs
        transport.start(tag, transport.reduce, tensors, outs, bucket, kwargs["offsets"], kwargs["shard"], whole, everywhere)

    return start, (tuple(args), tuple(outs), bucket), {}


def _of_tensor(op: str, out: Operand, x: Operand, tag: str, transport: Transport, scratch: Operand | None) -> Bound:
    """One tensor over the axis `tp`, to the end: what comes next in the program needs it."""

    def gather(x: Tensor, out: Tensor) -> None:
        transport.now(tag, transport.all_gather, memory_order(x), out)

    stays = all(operand.space in ("arena", "persistent") for operand in (x, out))  # what moves must not be held for the next step
    made: list[Callable[[], None]] = []

    def reduce(x: Tensor, out: Tensor, bucket: Tensor) -> None:
        if made:
            transport.now(tag, made[0])
            return
        collective = transport.summing(x, out, bucket, tensor_shard(op, x.numel(), transport.num_ranks), op == TENSOR_SUM)
        if stays:
            made.append(collective)
        transport.now(tag, collective)

    return (gather, (x, out), {}) if op == TENSOR_GATHER else (reduce, (x, out, scratch), {})
