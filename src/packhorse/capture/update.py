"""The torch.optim object -> runs of flat storage and the update graph: norm, clipping, and one optimizer node per run.

The optimizer's class, groups and flags are honoured; its own `step` is never called. Numbers that may change from step to step (lr, betas, eps,
weight decay, momentum, dampening) are not part of the graph: the kernel reads the group at every step.
"""

from dataclasses import dataclass

import torch

from packhorse.capture.capture import Captured
from packhorse.capture.dtypes import SHORT
from packhorse.capture.trace import dense_strides, distinct
from packhorse.errors import UserError
from packhorse.graph.dtypes import ITEMSIZE
from packhorse.graph.ir import Graph, Input, Node, Output, Ref, Value, contiguous_strides
from packhorse.planning.persistent import Persistent, Run, like, make_run

SUPPORTED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
_REFUSED_FLAGS = ("capturable", "differentiable")


@dataclass(frozen=True)
class Owned:
    """A run of parameters that one parameter group updates, with its gradient run and its state runs by name."""

    group: int
    params: Run
    grads: Run
    states: dict[str, Run]


def check_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises UserError for an optimizer that is not supported, or that holds other parameters than the model's."""
    kind = type(optimizer)
    if kind not in SUPPORTED:
        raise UserError(
            f"the optimizer {kind.__module__}.{kind.__qualname__} is not supported; use one of "
            f"{', '.join('torch.optim.' + c.__name__ for c in SUPPORTED)} (exactly that class, not a subclass)"
        )
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
        for flag in _REFUSED_FLAGS:
            if group.get(flag):
                raise UserError(
                    f"parameter group {index} of the optimizer has {flag}=True, which a planned step cannot honour; make it with {flag}=False"
                )


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


def state_names(optimizer: torch.optim.Optimizer, group: dict) -> list[str]:
    """Names of the per-element states of a group, as torch.optim calls them."""
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
    return ["momentum_buffer"] if group["momentum"] != 0 else []


def flat_storage(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, captured: Captured, clip_norm: float | None
) -> tuple[Persistent, list[Owned]]:
    """Every run of persistent storage, and those that the optimizer updates.

    Parameters with the same (dtype, requires_grad, has a gradient, parameter group) share a run, in the model's order.
    """
    trained = captured.trained()
    group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    bundles: dict[tuple, list[tuple[str, Value]]] = {}
    for name, param in distinct(model.named_parameters(remove_duplicate=False)).items():
        group = group_of.get(id(param))
        key = (SHORT[param.dtype], param.requires_grad, name in trained, group)
        bundles.setdefault(key, []).append((name, _value(name, param)))
    runs, owned = [], []
    for (dtype, requires_grad, has_grad, group), tensors in bundles.items():
        label = (
            f"{dtype}."
            + (f"g{group}" if group is not None else "nogroup")
            + ("" if requires_grad else ".frozen")
            + ("" if has_grad or not requires_grad else ".unused")
        )
        params = make_run(f"param.{label}", "parameters", "param", tensors)
        runs.append(params)
        if not has_grad:
            continue
        grads = like(params, f"grad.{label}", "gradients", "grad")
        runs.append(grads)
        if group is None:
            continue
        states = {s: like(params, f"{s}.{label}", "optimizer states", "state") for s in state_names(optimizer, optimizer.param_groups[group])}
        if states:
            step = f"step.{label}"
            # a count for each parameter, as torch keeps it, so that its own step() could go on from here
            states["step"] = make_run(step, "optimizer states", "state", [(step, Value(step, "f32", (len(tensors),), (1,)))])
        runs += states.values()
        owned.append(Owned(group, params, grads, states))
    runs += _by_dtype("buffer", "buffers", "buffer", [(n, _value(n, b)) for n, b in distinct(model.named_buffers(remove_duplicate=False)).items()])
    runs += _by_dtype("constant", "constants", "constant", _constants(captured))
    runs += _by_dtype("metric", "metrics", "metric", _metrics(captured, clip_norm))
    return Persistent(tuple(runs)), owned


def _constants(captured: Captured) -> list[tuple[str, Value]]:
    return [(i.target, i.value) for i in captured.micro.inputs if i.role == "constant"]


def _metrics(captured: Captured, clip_norm: float | None) -> list[tuple[str, Value]]:
    loss = next(captured.micro.values[o.name] for o in captured.micro.outputs if o.role == "metric")
    found = [("loss", Value("loss", loss.dtype, (), ()))]
    if clip_norm is not None:
        norm = norm_dtype(captured)
        found += [("grad_norm", Value("grad_norm", norm, (), ())), ("clip_coefficient", Value("clip_coefficient", norm, (), ()))]
    return found


def norm_dtype(captured: Captured) -> str:
    """The widest dtype among the gradients."""
    dtypes = {captured.micro.values[o.name].dtype for o in captured.micro.outputs if o.role == "grad"}
    return max(dtypes, key=lambda d: ITEMSIZE[d])


def _by_dtype(name: str, kind: str, role: str, tensors: list[tuple[str, Value]]) -> list[Run]:
    bundles: dict[str, list[tuple[str, Value]]] = {}
    for target, value in tensors:
        bundles.setdefault(value.dtype, []).append((target, value))
    return [make_run(f"{name}.{dtype}", kind, role, group) for dtype, group in bundles.items()]


def _value(name: str, tensor: torch.Tensor) -> Value:
    return Value(name, SHORT[tensor.dtype], tuple(tensor.shape), dense_strides(tensor))


def update_graph(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, persistent: Persistent, owned: list[Owned], clip_norm: float | None
) -> Graph:
    """norm -> clip coefficient -> one optimizer node per run. The unclipped gradients stay as they are: each chunk is scaled as it is used.

    The norm is the norm of the gradients' norms, in the model's order, as torch.nn.utils.clip_grad_norm_ computes it.
    """
    inputs: list[Input] = []
    nodes: list[Node] = []
    outputs: list[Output] = []
    coefficient: Ref | None = None
    if clip_norm is not None:
        metric = {slot.target: slot.value.dtype for run in persistent.runs if run.kind == "metrics" for slot in run.slots}
        grads = {slot.target: slot.value for run in persistent.runs if run.kind == "gradients" for slot in run.slots}
        order = [name for name in distinct(model.named_parameters(remove_duplicate=False)) if name in grads]
        for name in order:
            value = grads[name]
            inputs.append(Input(Value(f"grad.{name}", value.dtype, value.shape, value.strides), "grad", name))
        norm = Value("grad_norm", metric["grad_norm"], (), ())
        nodes.append(Node("packhorse.grad_norm.default", (tuple(Ref(f"grad.{name}") for name in order),), (), (norm,), "update"))
        clip = Value("clip_coefficient", metric["clip_coefficient"], (), ())
        nodes.append(Node("packhorse.clip_coefficient.default", (Ref(norm.name), float(clip_norm)), (), (clip,), "update"))
        outputs += [Output(norm.name, "metric", "grad_norm"), Output(clip.name, "metric", "clip_coefficient")]
        coefficient = Ref(clip.name)
    for item in owned:
        _optimizer_node(optimizer, item, coefficient, inputs, nodes, outputs)
    return Graph("update", tuple(inputs), tuple(nodes), tuple(outputs))


def _optimizer_node(optimizer, item: Owned, coefficient: Ref | None, inputs: list[Input], nodes: list[Node], outputs: list[Output]) -> None:
    group = optimizer.param_groups[item.group]
    updated = {"param": item.params, **item.states}
    args: dict[str, Ref] = {}
    for key, run in [("param", item.params), ("grad", item.grads), *item.states.items()]:
        shape = run.slots[0].value.shape if key == "step" else (run.num_bytes // ITEMSIZE[run.dtype],)
        value = Value(run.name, run.dtype, shape, contiguous_strides(shape))
        inputs.append(Input(value, run.slots[0].role, f"run {run.name}"))
        args[key] = Ref(run.name)
    fused = bool(group.get("fused"))
    pieces = tuple((s.offset // ITEMSIZE[item.params.dtype], s.value.num_elements) for s in item.params.slots)
    kwargs: tuple = (("group", item.group), ("fused", fused), ("pieces", pieces))
    scaled = coefficient is not None or (group["maximize"] and not fused)
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        names = ["param", "exp_avg", "exp_avg_sq", "step", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        op = "packhorse.adam_amsgrad.default" if group["amsgrad"] else "packhorse.adam.default"
        decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))
        scaled = scaled or (not fused and not decoupled and group["weight_decay"] != 0)
        kwargs += (("decoupled", decoupled), ("temporaries", int(scaled) + int(not fused)))
    else:
        names = ["param", "momentum_buffer", "step"] if item.states else ["param"]
        op = "packhorse.sgd_momentum.default" if item.states else "packhorse.sgd.default"
        scaled = scaled or (not fused and (group["weight_decay"] != 0 or group["nesterov"]))
        kwargs += (("temporaries", int(scaled)),)
    shapes = {n: updated[n].slots[0].value.shape if n == "step" else (updated[n].num_bytes // ITEMSIZE[updated[n].dtype],) for n in names}
    results = tuple(Value(f"new.{updated[n].name}", updated[n].dtype, shapes[n], (1,)) for n in names)
    operands = (args["param"], args["grad"], *(args[n] for n in names[1:]), coefficient)
    nodes.append(Node(op, operands, kwargs, results, "update"))
    outputs += [Output(value.name, updated[n].slots[0].role, f"run {updated[n].name}") for n, value in zip(names, results)]
