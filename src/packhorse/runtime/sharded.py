"""A model over several ranks: parameters from rank 0 to where their shards lie, and whole tensors back from the shards."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from packhorse.capture.dtypes import LONG, SHORT
from packhorse.capture.trace import distinct
from packhorse.planning.persistent import Persistent, Run, Slot, holds_models_own
from packhorse.planning.plan import Plan
from packhorse.runtime.ranks import Ranks
from packhorse.runtime.storage import on_host, view, views
from packhorse.runtime.transport import memory_order


def spread_model(model: nn.Module, persistent: Persistent, runs: dict[str, Tensor], ranks: Ranks) -> None:
    """Rank 0's parameters and buffers to all ranks, one after another; each rank keeps its part of the parameters, and the model's own are left on
    meta. Buffers stay the live ones, and are this rank's.

    Raises UserError if the model is on meta.
    """
    on_host(model)
    homes = _homes(persistent)
    with torch.no_grad():
        for name, tensor in distinct(model.named_parameters(remove_duplicate=False)).items():
            whole = tensor.detach().contiguous()
            ranks.broadcast(whole)
            for run, slot in homes[name]:
                flat = memory_order(torch.empty_strided(_whole(run, name).shape, _whole(run, name).strides, dtype=whole.dtype).copy_(whole))
                home = memory_order(view(runs[run.name], slot))
                home.copy_(flat[slot.begin : slot.begin + home.numel()])
            _to_meta(tensor)
        buffers = views(persistent, runs, "buffer")
        for name, tensor in distinct(model.named_buffers(remove_duplicate=False)).items():
            whole = tensor.detach().contiguous()
            ranks.broadcast(whole)
            buffers[name].copy_(whole)
            tensor.data = buffers[name]


def gathered(runs: dict[str, Tensor], kept: list[Run], ranks: Ranks) -> Iterator[tuple[str, Tensor]]:
    """(target, whole tensor) of every slot of the runs, from the shards of all ranks, one run at a time. Every rank has to iterate to the end."""
    for run in kept:
        itemsize = LONG[run.dtype].itemsize
        own = runs[run.name][run.own_offset : run.own_offset + run.shard_bytes].view(LONG[run.dtype])
        flat = ranks.all_gather(own, f"whole {run.name}").view(-1)
        for slot in run.layout.slots:
            yield slot.target, flat.as_strided(slot.value.shape, slot.value.strides, slot.offset // itemsize)


def description(plan: Plan) -> dict[str, Any]:
    """What all ranks of a job have in common, in words, for a comparison before the first step."""
    options, job = plan.options, plan.job
    parameters = {name: f"{SHORT[p.dtype]}{list(p.shape)} {p.requires_grad}" for name, p in job.parameters.items()}
    return {
        "the mesh": f"dp={options.mesh.dp}, tp={options.mesh.tp}",
        "zero_stage": options.zero_stage,
        "num_micro_batches": options.num_micro_batches,
        "clip_norm": options.clip_norm,
        "recompute": options.recompute,
        "the budget": options.budget,
        "the precision": str(job.widths),
        "the optimizer": type(job.optimizer).__name__,
        **{
            f"the setting {key} of parameter group {index}": str(value)
            for index, group in enumerate(job.optimizer.param_groups)
            for key, value in group.items()
            if key != "params"
        },
        "the number of parameters": len(parameters),
        **{f"the parameter {name}": what for name, what in parameters.items()},
    }


def own_runs(persistent: Persistent) -> list[Run]:
    """The runs that hold the model's own parameters."""
    return [run for run in persistent.runs if holds_models_own(run)]


def _homes(persistent: Persistent) -> dict[str, list[tuple[Run, Slot]]]:
    """Parameter -> the runs that hold it, its copies and master weights included, and where."""
    table: dict[str, list[tuple[Run, Slot]]] = {}
    for run in persistent.runs:
        if run.kind in ("parameters", "master weights"):
            for target in run.offsets:
                table.setdefault(target, [])
            for slot in run.slots:
                table[slot.target].append((run, slot))
    return table


def _whole(run: Run, name: str):
    return next(slot.value for slot in run.layout.slots if slot.target == name)


def _to_meta(tensor: Tensor) -> None:
    """Frees the memory of a parameter; it stays the very object that the optimizer knows."""
    empty = nn.Parameter(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"), tensor.requires_grad)
    torch.utils.swap_tensors(tensor, empty)
