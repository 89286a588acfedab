"""The pipeline from a model to the plan of its step: capture, storage, passes of several ranks, the choice (docs/design.md)."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from packhorse.capture.batch import signature
from packhorse.capture.capture import Captured, capture, capture_whole
from packhorse.capture.flat_storage import Owned, Widths, flat_storage
from packhorse.capture.stamp import Whole
from packhorse.capture.tensor_plan import sharding_of
from packhorse.capture.trace import distinct
from packhorse.capture.update import agreement_graph, check_optimizer, check_parameters, norm_graph, update_graph
from packhorse.device.device import Device
from packhorse.errors import BudgetError
from packhorse.graph.ir import Graph
from packhorse.parallel.partition import Partition
from packhorse.parallel.units import units_of
from packhorse.parallel.zero import Zero, gather_updated, loss_graph
from packhorse.planning.choose import MICRO, make_plan
from packhorse.planning.persistent import Persistent
from packhorse.planning.plan import Options, Plan
from packhorse.residency.update import updated_on_host
from packhorse.runtime.job import Job, group_structure, modes_of


def plan_step(
    model: torch.nn.Module,
    sample: Any,
    optimizer: torch.optim.Optimizer,
    loss: Callable | None,
    widths: Widths,
    options: Options,
    device: Device,
    tensor_plan: Any = None,
    sequence_parallel: bool = False,
    whole: Whole | None = None,
) -> Plan:
    """The plan of one step, of arguments that have been looked at (api.py). sample: one micro-batch. whole: what `capture_whole` gave for this model
    and sample, so that many plans of one step share it. Raises what `packhorse.plan` raises."""
    check_optimizer(model, optimizer)
    check_parameters(model)

    if options.optimizer_residency == "auto" and options.host_budget is not None and options.budget is not None:
        shared = whole or capture_whole(model, sample, loss, widths.compute)

        def planned(where: str) -> Plan:
            decided = replace(options, optimizer_residency=where)
            return plan_step(model, sample, optimizer, loss, widths, decided, device, tensor_plan, sequence_parallel, shared)

        return _faster(planned, device)
    states_on_host = options.optimizer_residency == "offload"
    mesh, num_micro_batches, clip_norm = options.mesh, options.num_micro_batches, options.clip_norm
    sharding = sharding_of(model, mesh, options.rank, tensor_plan, sequence_parallel)
    parameters: dict[str, Any] = distinct(model.named_parameters(remove_duplicate=False))
    adds = options.zero_stage < 2 or mesh.dp == 1
    captured = capture(model, sample, loss, num_micro_batches, widths.compute, widths.grads, adds, sharding, whole)
    partition = None
    if mesh.world_size > 1:
        partition = Partition(
            options.zero_stage if mesh.dp > 1 else 0, mesh.dp, mesh.dp_rank(options.rank), units_of(captured.micro, list(parameters))
        )
    persistent, owned = flat_storage(model, optimizer, captured, clip_norm, widths, partition, sharding, states_on_host)
    zero = None
    if partition is not None:
        if num_micro_batches == 1 and options.share:  # nothing reads a gradient of the step before
            persistent = replace(persistent, lent=tuple(run.name for run in persistent.runs if run.kind == "gradients"))
        alone = flat_storage(model, optimizer, captured, clip_norm, widths, sharding=sharding, states_on_host=states_on_host)[0]
        zero = Zero(partition, persistent, alone, sharding, captured.gathered)
    graphs = _graphs(model, optimizer, captured, persistent, owned, clip_norm, num_micro_batches, zero)
    around = None
    if zero is not None and not zero.is_alone and not options.sketch:
        around = {}
        for judge in zero.partition.judges:
            part = replace(zero.partition, rank=judge)
            owned = flat_storage(model, optimizer, captured, clip_norm, widths, part, sharding, states_on_host)[1]
            seen = zero.seen_by(judge)
            theirs = _graphs(model, optimizer, captured, seen.persistent, owned, clip_norm, num_micro_batches, seen)
            around[judge] = {name: graph for name, graph in theirs.items() if name not in MICRO}
    constants, generators = captured.constants, captured.generators
    given = signature(sample)
    job = Job(optimizer, loss, widths, given, captured.questions, constants, generators, parameters, modes_of(model), group_structure(optimizer))
    return make_plan(graphs, persistent, options, device, job, zero, around)


def _faster(planned: Callable[[str], Plan], device: Device) -> Plan:
    """The plan with optimizer states on the device, or with them on the host, where that is the only one that fits, or the faster one.

    What moves at least, the gradients, is compared with what the budget costs, before anything is planned in vain. Several ranks have to decide
    alike, and know that of bytes alone."""
    try:
        kept = planned("keep")
    except BudgetError:
        with suppress(BudgetError):
            return planned("offload")
        raise
    states = any(run.kind in ("optimizer states", "master weights") and not run.is_numbers for run in kept.persistent.runs)
    gradients = sum(run.num_bytes for run in kept.persistent.runs if run.kind == "gradients")
    least = 0.0 if device.host_link is None else device.host_link.seconds(gradients)
    if not states or kept.overhead_seconds <= least or kept.options.mesh.world_size > 1:
        return kept
    with suppress(BudgetError):
        return min(kept, planned("offload"), key=lambda plan: plan.seconds)
    return kept


def _graphs(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    captured: Captured,
    persistent: Persistent,
    owned: list[Owned],
    clip_norm: float | None,
    num_micro_batches: int,
    zero: Zero | None,
) -> dict[str, Graph]:
    """Program name -> its graph, in the order of a step."""
    graphs = {
        "agree": agreement_graph(persistent),
        **captured.micro_batches(zero.names(num_micro_batches) if zero else ("first", "next")),
        "loss": None if zero is None else loss_graph(captured.loss(), zero),
        "norm": norm_graph(model, persistent, clip_norm, zero),
        "update": update_graph(optimizer, persistent, owned),
    }
    there = {name: graph for name, graph in graphs.items() if graph is not None}
    for name in ("agree", "update"):
        if name in there:
            there[name] = updated_on_host(there[name], persistent)
            there[name] = there[name] if zero is None else gather_updated(there[name], zero)
    return there
