"""The public functions: plan, compile."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.eval_frame import OptimizedModule

from packhorse.capture.batch import canonical, tensors_of
from packhorse.capture.dtypes import SHORT
from packhorse.capture.flat_storage import widths_of
from packhorse.device.device import load_device
from packhorse.errors import BatchError, UserError
from packhorse.mesh import Mesh
from packhorse.planning.budget import budget_bytes
from packhorse.planning.persistent import holds_models_own
from packhorse.planning.plan import Options, Plan
from packhorse.planning.residency import check_mode, host_budget_bytes
from packhorse.recompute.table import METHODS
from packhorse.runtime.step import Step
from packhorse.search.automatic import found_budget, found_by_search
from packhorse.search.short import Short
from packhorse.step_plan import plan_step


def plan(
    model: torch.nn.Module,
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer,
    loss: Callable | None = None,
    precision: str = "fp32",
    grad_dtype: torch.dtype | None = None,
    clip_norm: float | None = None,
    num_micro_batches: int | str = 1,
    mesh: Mesh | str | None = None,
    rank: int | None = None,
    zero_stage: int | str = 0,
    recompute: str = "auto",
    budget: int | str | None = None,
    host_budget: int | str | None = None,
    device: str | None = None,
    tensor_plan: Any = None,
    in_place: bool = True,
    share: bool = True,
    sequence_parallel: bool = False,
    residency: str = "auto",
    optimizer_residency: str = "auto",
) -> Plan:
    """The plan of one training step: every byte it will take, before anything runs.

    batch: one micro-batch (a dict calls model(**batch), a tuple model(*batch), a tensor model(batch)), or a list of num_micro_batches of them.
    loss: loss(output, batch) -> scalar; by default the model's scalar output, or the output's `.loss`. Tensors that it or the model hold
    besides parameters and buffers are copied as they are now.
    precision: "fp32" keeps the model's own dtype. "bf16", "fp16": parameters are computed with as 16-bit copies under autocast, with islands of fp32
    (capture/precision.py has the recipe); the model's own wide parameters are the master weights, and a model of that dtype gets wide ones beside it.
    fp16 scales the loss; a step whose gradients overflow is skipped (`step.last.skipped`, `step.loss_scale`).
    grad_dtype: dtype in which gradients are kept and added up; by default the one that they are computed in.
    clip_norm: largest global 2-norm of the gradients.
    recompute: what is computed again in the backward pass, a name of recompute/table.py: "none", "cheap", "sqrt", "chen", "recursive", "blocks",
    "optimal", "milp"; "auto" is "optimal". budget: of the whole step's peak, as bytes, "6GiB", "40%" of the keep-everything peak, or "minimum", the
    least of the method; of several plans that meet it the fastest is taken. None: "auto" and "optimal" keep everything, the others take
    their leanest plan.
    mesh: how many ranks share the step; dp of them take a part of the batch each, and gradients are those of the mean of their losses; tp of them
    split the model itself, and get the same part (docs/tensor.md). rank: the one that is planned, by default RANK of the launcher. zero_stage: what
    is sharded over dp (0: nothing, 1: optimizer states, 2: gradients too, 3: parameters too; ZeRO, section 5). tensor_plan: which layers are split
    over tp, and how: module-name pattern -> "column", "row", "vocab" or "whole"; by default as the model's own plan says. sequence_parallel: what
    lies between the split layers is split along the sequence.
    residency: where saved values wait for the backward pass besides in place. "auto": where that meets the budget and is fastest, together with
    recomputation and what ZeRO gathers; "keep": nowhere else; "shard": all that tensor parallel ranks have alike is cut over them (P_a of ZeRO-R,
    section 6.1); "offload": everything goes to the host, and as slices what can be cut (P_a+cpu). optimizer_residency: where optimizer states and
    master weights lie. "offload": on the host, which computes the update; "keep": on the device; "auto": on the host where only that meets the
    budget, or, on one rank, is predicted to be faster in it. host_budget: of the host's memory for both, as bytes, "8GiB" or "30%" of what the
    forward pass saves; None: nothing goes there.
    mesh, zero_stage, num_micro_batches may be "auto": the fastest of those that fit, for as many ranks as the launcher has started (WORLD_SIZE). The
    budget, or the device's memory, is what they have to fit; with num_micro_batches="auto" the batch is all that a dp rank has in a step.
    device: the device file that says what operators take (`packhorse calibrate` writes one), by path or by the name of one that comes
    along. in_place, share: switch off taking over storage that dies, and sharing bytes between lifespans, to see what they save.
    The model is only looked at and may be on the meta device. No GPU and no process group are needed.

    Raises CaptureError (module and line), BatchError, BudgetError (with the least budget that works), UserError for options of later versions.
    """
    automatic = [name for name, given in (("mesh", mesh), ("zero_stage", zero_stage), ("num_micro_batches", num_micro_batches)) if given == "auto"]
    _check_arguments(model, batch, optimizer, loss, clip_norm, 1 if "num_micro_batches" in automatic else num_micro_batches)
    if recompute not in ("auto", *METHODS):
        raise UserError(f"recompute={recompute!r} is no method; expected auto or one of {', '.join(METHODS)}")
    budget_bytes(budget, 0)  # what is no budget is refused before anything is captured
    host_budget_bytes(host_budget, 0)
    widths = widths_of(model, precision, grad_dtype)
    described = load_device(device)
    if automatic:
        short = Short(model, batch, optimizer, loss, widths, clip_norm, described, tensor_plan, sequence_parallel, host_budget)
        found = found_by_search(short, mesh, zero_stage, num_micro_batches, budget)
        mesh, zero_stage, num_micro_batches, batch = found.mesh, found.stage, found.num_micro_batches, short.first(found.samples)
        budget = found_budget(budget, described)
    mesh = mesh or Mesh()
    if not isinstance(mesh, Mesh):
        raise UserError(f"mesh={mesh!r}: expected a packhorse.Mesh, None for one rank, or auto")
    rank = _rank_of(rank, mesh)
    _check_stage(zero_stage)
    check_mode(residency, optimizer_residency, mesh, host_budget)
    assert isinstance(zero_stage, int) and isinstance(num_micro_batches, int)
    # of micro-batches of several sizes the largest is planned: the others need no more, and get programs of their own when first seen
    micros = [canonical(micro) for micro in (batch if isinstance(batch, list) else [batch])]
    sample = max(micros, key=lambda micro: sum(tensor.numel() for tensor in tensors_of(micro)))
    options = Options(
        recompute,
        budget,
        num_micro_batches,
        clip_norm,
        mesh,
        in_place,
        share,
        rank,
        zero_stage,
        residency,
        host_budget,
        optimizer_residency=optimizer_residency,
    )
    return plan_step(model, sample, optimizer, loss, widths, options, described, tensor_plan, sequence_parallel)


def compile(model: torch.nn.Module, plan: Plan, scheduler: Any = None) -> Step:
    """The step of `plan`, ready to run: allocates exactly the plan's bytes and makes the model's tensors views of them.

    scheduler: a torch.optim.lr_scheduler; its step() is called after each optimizer step. With several ranks it joins them (torch.distributed, as the
    launcher says), takes rank 0's values, and leaves the model's own parameters on meta.
    Raises UserError if the model is on meta and not made by `packhorse.deferred`, or is not the one that was planned, or the scheduler wants to see a
    metric, or the ranks were given different things.
    """
    if not isinstance(plan, Plan):
        raise UserError(f"packhorse.compile(model, plan): the second argument is a {type(plan).__name__}, expected what packhorse.plan returns")
    if scheduler is not None and getattr(scheduler, "optimizer", None) is not plan.job.optimizer:
        raise UserError(
            "the scheduler is not one over the planned optimizer, so it would change learning rates that no step "
            "reads; make it from the very optimizer "
            "that was given to packhorse.plan"
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UserError(
            "the scheduler ReduceLROnPlateau wants a metric at each step, which a compiled step does not have; leave scheduler=None and call "
            "scheduler.step(metric) yourself: the optimizer's learning rates are read at every step"
        )
    own = [run for run in plan.persistent.runs if run.kind == "buffers" or holds_models_own(run)]
    planned = {
        ("buffer" if run.kind == "buffers" else "param", slot.target): (run.dtype, slot.part.shape if slot.part else slot.value.shape)
        for run in own
        for slot in run.layout.slots
    }
    seen: dict[tuple[str, str], torch.Tensor] = {("param", n): p for n, p in model.named_parameters()}
    seen |= {("buffer", n): b for n, b in model.named_buffers()}
    same = planned.keys() == seen.keys() and all(seen["param", n] is p for n, p in plan.job.parameters.items())
    if not same or any((SHORT[seen[k].dtype], tuple(seen[k].shape)) != what for k, what in planned.items()):
        raise UserError(
            "the plan was made for another model than the one given to packhorse.compile: its parameters or buffers are other ones, or were "
            "added, replaced or converted since; pass the very model that was planned, or plan this one (with an optimizer over its parameters)"
        )
    return Step(model, plan, scheduler)


def _refuse_wrapped(model: torch.nn.Module) -> None:
    """A wrapper compiles or sends on its own, which a captured step has no place for."""
    if isinstance(model, OptimizedModule):
        raise UserError("packhorse.plan was given a model compiled by torch.compile; pass the original module: model._orig_mod")
    if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        raise UserError(f"packhorse.plan was given a model wrapped in {type(model).__name__}; pass model.module, the model inside it")


def _check_arguments(model: Any, batch: Any, optimizer: Any, loss: Any, clip_norm: Any, num_micro_batches: Any) -> None:
    """Raises UserError or BatchError for what is wrong by itself."""
    if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        seen = f"{type(model).__name__} and optimizer={type(optimizer).__name__}"
        raise UserError(f"packhorse.plan(model, batch, optimizer=...): expected a torch.nn.Module and a torch.optim optimizer, seen {seen}")
    _refuse_wrapped(model)
    if loss is not None and not callable(loss):
        raise UserError(
            f"packhorse.plan: loss is a {type(loss).__name__}, expected a function that is called as loss(output, batch) and returns a "
            "floating-point scalar, or None to take the model's own loss"
        )
    if clip_norm is not None and not (isinstance(clip_norm, (int, float)) and clip_norm > 0):
        raise UserError(f"clip_norm={clip_norm!r}: the largest norm of the gradients is a positive number, or None for no clipping")
    if not isinstance(num_micro_batches, int) or num_micro_batches < 1:
        raise UserError(f"num_micro_batches={num_micro_batches!r}: a step has a whole number of micro-batches, 1 or more")
    if isinstance(batch, list) and len(batch) != num_micro_batches:
        raise BatchError(
            f"packhorse.plan was given a list of {len(batch)} batches, num_micro_batches is {num_micro_batches}; "
            f"{f'set num_micro_batches={len(batch)}' if batch else 'give at least one batch'}"
        )


def _rank_of(rank: int | None, mesh: Mesh) -> int:
    """The rank that is planned: the one asked for, else RANK of a launcher, else 0."""
    if rank is None:
        given = os.environ.get("RANK", "0") if mesh.world_size > 1 else "0"
        rank = int(given) if given.isdecimal() else 0
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < mesh.world_size:
        raise UserError(f"rank={rank!r}: a mesh of dp={mesh.dp} and tp={mesh.tp} has the ranks 0 to {mesh.world_size - 1}")
    return rank


def _check_stage(zero_stage: Any) -> None:
    if zero_stage not in (0, 1, 2, 3) or isinstance(zero_stage, bool):
        raise UserError(f"zero_stage={zero_stage!r}: the stages of ZeRO are 0 (nothing sharded), 1 (optimizer states), 2 (gradients), 3 (parameters)")
