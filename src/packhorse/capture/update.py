"""The optimizer object -> the graphs around the micro-batches: weights in 16 bits before them; norm, clipping and one optimizer node per run after.

What the optimizer's class does is its description in packhorse/optim; its own `step` is never called. Numbers that may change from step to step (lr,
betas, eps, weight decay, momentum, dampening) are not part of the graph: the kernel reads the group at every step.
"""

from dataclasses import replace

import torch

from packhorse.capture.dtypes import LONG, SHORT, to_const
from packhorse.capture.flat_storage import Owned
from packhorse.capture.trace import distinct
from packhorse.errors import UserError
from packhorse.graph.dtypes import ITEMSIZE
from packhorse.graph.ir import Graph, Input, Node, Output, Ref, Value, contiguous_strides
from packhorse.optim.elementwise import Elementwise, is_fused
from packhorse.optim.table import check_settings, describe
from packhorse.parallel.split import Sharding
from packhorse.parallel.zero import Zero, over_ranks
from packhorse.planning.persistent import Persistent, Run, holds_models_own, shard_of


def check_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises UserError for an optimizer that is not supported, or that holds other parameters than the model's."""
    described = describe(optimizer)
    known = {id(p) for p in model.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        foreign = [tuple(p.shape) for p in group["params"] if id(p) not in known]
        if foreign:
            raise UserError(
                f"parameter group {index} of the optimizer holds {len(foreign)} parameters that are not the model's "
                f"(the first of shape {list(foreign[0])}); "
                "make the optimizer from model.parameters() of the very model that is planned, after any change of the model"
            )
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise UserError("the optimizer has step hooks, which a planned step would not run: its own step() is never called; remove them")
    check_settings(optimizer, described)


def check_parameters(model: torch.nn.Module) -> None:
    """Raises UserError for parameters that a plan cannot hold to: with gradient hooks, or in memory that they share."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UserError(
                f"parameter {name!r} has a gradient hook, which a captured step would not run; remove it, and scale or mask inside forward instead"
            )
    ends: list[tuple[int, int, str]] = []
    for name, tensor in distinct(model.named_parameters(remove_duplicate=False)).items():
        if tensor.device.type != "meta" and tensor.numel():
            extent = Value("", SHORT[tensor.dtype], tuple(tensor.shape), tuple(tensor.stride())).extent_bytes
            ends.append((tensor.data_ptr(), tensor.data_ptr() + extent, name))
    for (_, end, first), (start, _, second) in zip(sorted(ends), sorted(ends)[1:]):
        if start < end:
            raise UserError(
                f"parameters {first!r} and {second!r} are different ones that share memory, so each would overwrite "
                f"the other; tie them by making them "
                f"one Parameter (module.weight = other.weight, not .data)"
            )


def agreement_graph(persistent: Persistent) -> Graph | None:
    """What makes 16-bit weights and master weights agree, before the first micro-batch and before an evaluation: values that somebody changed in the
    model are seen. The graph "agree", or None if there are no master weights.

    Of the model's own wide parameters the 16-bit copies are made anew; the master weights of its own 16-bit ones take over what was changed in those.
    With several ranks nobody can change the model in between: all copies are made anew, once, after parameters were loaded.
    """
    inputs, nodes, outputs = [], [], []
    runs = {run.name: run for run in persistent.runs}
    for run in persistent.runs:
        master = runs.get(run.name.replace("param.", "master.", 1)) if run.kind == "parameters" else None
        if master is None:
            continue
        sharded = master.whole is not None
        given, target = _part(master, sharded)
        inputs.append(Input(given, "master", target))
        if holds_models_own(master) or run.num_ranks > 1:
            made, target = _part(run, sharded, f"new.{run.name}")
            nodes.append(_converted(master.name, made, run.dtype))
            outputs.append(Output(made.name, "param", target))
        else:
            inputs.append(Input(_flat(run), "param", f"run {run.name}"))
            made = _flat(master, f"new.{master.name}")
            nodes.append(Node("packhorse.follow.default", (Ref(master.name), Ref(run.name)), (), (made,), "update"))
            outputs.append(Output(made.name, "master", f"run {master.name}"))
    return Graph("agree", tuple(inputs), tuple(nodes), tuple(outputs)) if nodes else None


def norm_graph(model: torch.nn.Module, persistent: Persistent, clip_norm: float | None, zero: Zero | None = None) -> Graph | None:
    """The norm of all gradients -> the factor that the update scales them by: the graph "norm", or None where neither is asked for.

    The norm is the norm of the gradients' norms, in the model's order, as torch.nn.utils.clip_grad_norm_ computes it on gradients in the dtype that
    the optimizer works in. With a loss scale it is that of the unscaled gradients: a power of two may be divided out before or after.
    With several ranks it is the norm of the ranks' norms, each over the shards of a rank, at every stage of ZeRO. What tp ranks have alike, the first
    of them counts.
    """
    metric = {slot.target: slot.value for run in persistent.runs if run.kind == "metrics" for slot in run.slots}
    if "grad_norm" not in metric:
        return None
    nodes: list[Node] = []
    inputs, widths, pieces = _shards_of_gradients(persistent, zero.sharding) if zero else (*_gradients(model, persistent), ())
    dtype = metric["grad_norm"].dtype
    scaled = "inverse_scale" in metric
    norm = Value("scaled_norm" if scaled else "grad_norm", dtype, (), ())
    of = tuple(Ref(given.value.name) for given in inputs)
    if zero:
        own = Value("own_norm", dtype, (), ())
        nodes.append(Node("packhorse.grad_norm.default", (of,), (("dtypes", widths), ("pieces", pieces)), (own,), "update"))
        every, gathering = over_ranks(own, "norms", zero, "world" if zero.sharding else "dp")
        nodes += gathering
        of, widths = (Ref(every.name),), (dtype,)
    nodes.append(Node("packhorse.grad_norm.default", (of,), (("dtypes", widths),), (norm,), "update"))
    inverse = Value("inverse_scale", dtype, (), ())
    if scaled:
        inputs.append(Input(inverse, "metric", "inverse_scale"))
        norm = Value("grad_norm", dtype, (), ())
        nodes.append(Node("aten.mul.Tensor", (Ref("scaled_norm"), Ref(inverse.name)), (), (norm,), "update"))
    outputs = [Output(norm.name, "metric", "grad_norm")]
    if clip_norm is not None:
        clip = Value("clip_coefficient", dtype, (), ())
        nodes.append(Node("packhorse.clip_coefficient.default", (Ref(norm.name), float(clip_norm)), (), (clip,), "update"))
        outputs.append(Output(clip.name, "metric", "clip_coefficient"))
        if scaled:
            factor = Value("grad_factor", dtype, (), ())
            nodes.append(Node("aten.mul.Tensor", (Ref(clip.name), Ref(inverse.name)), (), (factor,), "update"))
            outputs.append(Output(factor.name, "metric", "grad_factor"))
    return Graph("norm", tuple(inputs), tuple(nodes), tuple(outputs))


def _gradients(model: torch.nn.Module, persistent: Persistent) -> tuple[list[Input], tuple[str, ...]]:
    """Every gradient in the model's order, and the dtype to take its norm in."""
    grads = {slot.target: (slot.value, run) for run in persistent.runs if run.kind == "gradients" for slot in run.slots}
    order = [name for name in distinct(model.named_parameters(remove_duplicate=False)) if name in grads]
    inputs = [Input(replace(grads[name][0], name=f"grad.{name}"), "grad", name) for name in order]
    return inputs, tuple(_norm_width(grads[name][1], persistent) for name in order)


def _shards_of_gradients(persistent: Persistent, sharding: Sharding | None) -> tuple[list[Input], tuple[str, ...], tuple]:
    """This rank's shard of every run of gradients that it counts, the dtype to take the norm in, and the pieces of each."""
    counts_whole = sharding is None or sharding.rank == 0  # of what every tp rank has alike
    runs = [run for run in persistent.runs if run.kind == "gradients" and (counts_whole or run.is_split)]
    parts = [_part(run, run.num_ranks > 1) for run in runs]
    inputs = [Input(value, "grad", target) for value, target in parts]
    return inputs, tuple(_norm_width(run, persistent) for run in runs), tuple(_pieces(run, run.num_ranks > 1) for run in runs)


def _norm_width(run: Run, persistent: Persistent) -> str:
    """The wider dtype of a run of gradients and of what the optimizer works on with them."""
    label = run.name.removeprefix("grad.")
    works_on = persistent.by_name.get(f"master.{label}") or persistent.by_name[f"param.{label}"]
    return max(run.dtype, works_on.dtype, key=lambda d: ITEMSIZE[d])


def update_graph(optimizer: torch.optim.Optimizer, persistent: Persistent, owned: list[Owned]) -> Graph:
    """The graph "update": one optimizer node per run. Gradients stay as they are: each chunk is scaled by the norm graph's factor as it is used."""
    inputs: list[Input] = []
    nodes: list[Node] = []
    outputs: list[Output] = []
    metric = {slot.target: slot.value for run in persistent.runs if run.kind == "metrics" for slot in run.slots}
    factor = next((name for name in ("grad_factor", "clip_coefficient", "inverse_scale") if name in metric), None)
    if factor is not None:
        inputs.append(Input(Value(factor, metric[factor].dtype, (), ()), "metric", factor))
    described = describe(optimizer)
    for item in owned:
        _optimizer_node(described, optimizer.param_groups[item.group], item, None if factor is None else Ref(factor), inputs, nodes, outputs)
    return Graph("update", tuple(inputs), tuple(nodes), tuple(outputs))


def _optimizer_node(
    described: Elementwise, group: dict, item: Owned, coefficient: Ref | None, inputs: list[Input], nodes: list[Node], outputs: list[Output]
) -> None:
    """(param, *states, *numbers) = optimize(param, *states, *numbers, grad, coefficient), all flat; what is new lies where the old was."""
    updated = [item.params, *item.states.values(), *item.numbers.values()]
    results = []
    for run in [*updated, item.grads]:
        if run in item.numbers.values():  # numbers have no padding and no shards
            value, target = Value(run.name, run.dtype, run.slots[0].value.shape, (1,)), f"run {run.name}"
        else:
            value, target = _part(run, item.sharded)
        inputs.append(Input(value, run.role, target))
        if run is not item.grads:
            results.append(Value(f"new.{run.name}", run.dtype, value.shape, value.strides))
            outputs.append(Output(f"new.{run.name}", run.role, target))
    pieces = _pieces(item.params, item.sharded)
    assert pieces == _pieces(item.grads, item.sharded), f"{item.grads.name}: gradients lie at other element offsets than their parameters"
    needs = described.needs_of(group)
    # a gradient that is scaled, converted or changed is worked on in a temporary, the last: the step's own one stays as it is
    own_grad = coefficient is not None or needs.changes_grad or item.grads.dtype != item.params.dtype
    kwargs: tuple = (
        ("group", item.group),
        ("fused", is_fused(group)),
        ("states", tuple(item.states)),
        ("numbers", tuple(item.numbers)),
        ("pieces", pieces),
        ("own_grad", own_grad),
        ("temporaries", needs.temporaries + own_grad),
    )
    args = (*(Ref(run.name) for run in updated), Ref(item.grads.name), coefficient)
    nodes.append(Node(f"packhorse.optimize.{len(updated) - 1}", args, kwargs, tuple(results), "update"))
    if item.copies is not None:
        copy, target = _part(item.copies, item.sharded, f"new.{item.copies.name}")
        nodes.append(_converted(results[0].name, copy, copy.dtype))
        outputs.append(Output(copy.name, "param", target))


def _flat(run: Run, name: str | None = None) -> Value:
    """All that is held of a run as one tensor."""
    shape = (run.num_bytes // ITEMSIZE[run.dtype],)
    return Value(name or run.name, run.dtype, shape, contiguous_strides(shape))


def _part(run: Run, sharded: bool, name: str | None = None) -> tuple[Value, str]:
    """This rank's shard of a run, or all that is held of it, as one tensor, and what it stands for."""
    if not sharded:
        return _flat(run, name), f"run {run.name}"
    return Value(name or run.name, run.dtype, (run.shard_bytes // ITEMSIZE[run.dtype],), (1,)), f"shard {run.name}"


def _pieces(run: Run, sharded: bool) -> tuple[tuple[int, int, int], ...]:
    """(first element, elements, number of the parameter) of what an optimizer takes at once in a run, or in this rank's shard of it.

    A run that is cut into shards is worked on in the pieces of them all, so that every stage of ZeRO rounds alike.
    """
    layout, itemsize = run.layout, ITEMSIZE[run.dtype]
    number = {slot.target: index for index, slot in enumerate(layout.slots)}
    found = []
    for rank in [run.rank] if sharded else range(run.num_ranks):
        shard = shard_of(replace(layout, rank=rank)) if run.num_ranks > 1 else layout
        start = 0 if sharded else rank * (run.shard_bytes // itemsize)
        found += [(start + slot.offset // itemsize, slot.value.num_elements, number[slot.target]) for slot in shard.slots]
    return tuple(found)


def _converted(source: str, result: Value, dtype: str) -> Node:
    return Node("aten._to_copy.default", (Ref(source),), (("dtype", to_const(LONG[dtype])),), (result,), "update")
