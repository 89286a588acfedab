"""A model over several ranks: parameters from rank 0 to where their shards lie, and whole tensors back from the shards."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from packhorse.capture.dtypes import LONG, SHORT
from packhorse.capture.trace import distinct
from packhorse.planning.persistent import Persistent, Run, Slot, holds_models_own
from packhorse.planning.plan import Plan
from packhorse.runtime.deferred import made, order_of, recipe_of
from packhorse.runtime.parts import cut_out, in_memory_order, put_together
from packhorse.runtime.ranks import Ranks
from packhorse.runtime.storage import view, views
from packhorse.runtime.transport import memory_order


def spread_model(model: nn.Module, persistent: Persistent, runs: dict[str, Tensor], ranks: Ranks) -> None:
    """Rank 0's parameters and buffers to all ranks, one after another; each rank keeps its part of the parameters (over tp ranks, and its shard of
    that over dp ranks), and the model's own are left on meta. Buffers stay the live ones, and are this rank's. A model made by `packhorse.deferred`
    gets its values here: at no time does a rank hold more of it than its part and one tensor, and a rank's values are the same on every mesh.

    Raises UserError if the model is on meta otherwise.
    """
    parameters = distinct(model.named_parameters(remove_duplicate=False))
    buffers = distinct(model.named_buffers(remove_duplicate=False))
    homes, own_buffers = _homes(persistent), views(persistent, runs, "buffer")
    with torch.no_grad():
        for name, whole in _values(parameters | buffers, ranks):
            ranks.broadcast(whole)
            if name in buffers:
                own_buffers[name].copy_(whole)
                torch.utils.swap_tensors(buffers[name], own_buffers[name])
                continue
            for run, slot in homes[name]:
                like = next(s.value for s in run.layout.slots if s.target == name)
                flat = cut_out(whole, slot.part) if slot.part else in_memory_order(whole, like.shape, like.strides)
                home = memory_order(view(runs[run.name], slot))
                home.copy_(flat[slot.begin : slot.begin + home.numel()])
            _to_meta(parameters[name])


def _values(tensors: dict[str, Tensor], ranks: Ranks) -> Iterator[tuple[str, Tensor]]:
    """(name, values) of every tensor, in one order on all ranks: rank 0's own, and elsewhere memory for them."""
    recipe, known_as = recipe_of(tensors)
    if recipe is None:
        for name, tensor in tensors.items():
            yield name, tensor.detach().contiguous()
        return
    name_of = {known: name for name, known in known_as.items()}
    if ranks.rank == 0:
        for known, tensor in made(recipe, ranks.device):
            yield name_of[known], tensor.contiguous()
        return
    for known in order_of(recipe):
        tensor = tensors[name_of[known]]
        yield name_of[known], torch.empty(tensor.shape, dtype=tensor.dtype, device=ranks.device)


def gathered(runs: dict[str, Tensor], kept: list[Run], ranks: Ranks) -> Iterator[tuple[str, Tensor]]:
    """(target, whole tensor) of every slot of the runs, from the shards and parts of all ranks, one run at a time. Every rank has to iterate to the
    end."""
    for run in kept:
        itemsize = LONG[run.dtype].itemsize
        own = runs[run.name][run.own_offset : run.own_offset + run.shard_bytes].view(LONG[run.dtype])
        flat = ranks.all_gather(own, f"whole {run.name}", "dp").view(-1)
        each = ranks.all_gather(flat, f"all of {run.name}", "tp") if run.is_split else flat.view(1, -1)
        for slot in run.layout.slots:
            first = slot.offset // itemsize
            if slot.part is None:
                yield slot.target, flat[first:].as_strided(slot.value.shape, slot.value.strides)
            else:
                yield slot.target, put_together([part[first : first + slot.value.num_elements] for part in each], slot.part)


def description(plan: Plan) -> dict[str, Any]:
    """What all ranks of a job have in common, in words, for a comparison before the first step."""
    options, job = plan.options, plan.job
    parameters = {name: f"{SHORT[p.dtype]}{list(p.shape)} {p.requires_grad}" for name, p in job.parameters.items()}
    parts = {slot.target: slot.part for run in own_runs(plan.persistent) for slot in run.layout.slots if slot.part}
    parameters |= {name: f"{parameters[name]}, cut in dim {part.dim} into {list(part.ranges)}" for name, part in parts.items()}
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


def _to_meta(tensor: Tensor) -> None:
    """Frees the memory of a parameter; it stays the very object that the optimizer knows."""
    if tensor.device.type == "meta":
        return
    empty = nn.Parameter(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"), tensor.requires_grad)
    torch.utils.swap_tensors(tensor, empty)
