"""The nodes of packhorse/parallel as calls of the transport: what a program starts, and what it waits for."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from packhorse.graph.operators import ALL_GATHER, ALL_GATHER_OTHERS, ALL_REDUCE, REDUCE_SCATTER, WAIT
from packhorse.runtime.transport import Transport


def call_of_collective(op: str, outputs: tuple, args: tuple, kwargs: dict[str, Any], transport: Transport) -> tuple[Callable, tuple, dict[str, Any]]:
    """(function, arguments, keyword arguments) of one node; its operands are among the arguments."""
    tag = kwargs["tag"]
    if op == WAIT:
        return transport.wait, (tag,), {}
    if op == ALL_GATHER:
        return transport.start, (tag, transport.all_gather, args[0], outputs[0]), {}
    if op == ALL_GATHER_OTHERS:
        return transport.start, (tag, transport.all_gather_others, args[0], *outputs), {}
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
