"""The parameters and the optimizer object -> every run of flat storage that a step keeps.

With a 16-bit `compute` (capture/precision.py) a wide parameter has two tensors: the 16-bit copy that the step computes with (role "param") and
the model's own, its master weight (role "master"). A parameter that is 16-bit itself gets a wide master weight instead. The optimizer works on
master weights; its states have their dtype (ZeRO, section 3.1: K = 12 bytes a parameter with Adam).

Of a parameter that tensor parallel ranks share there is this rank's part, in everything. ZeRO cuts it once more.
"""

from dataclasses import dataclass, replace

import torch

from packhorse.capture.capture import Captured
from packhorse.capture.dtypes import SHORT
from packhorse.capture.precision import PRECISIONS, computed_dtype, is_narrow
from packhorse.capture.trace import dense_strides, distinct
from packhorse.errors import UserError
from packhorse.graph.dtypes import ITEMSIZE
from packhorse.graph.ir import Value
from packhorse.optim.elementwise import is_fused
from packhorse.optim.table import describe
from packhorse.parallel.part import Part, part_of
from packhorse.parallel.partition import Partition
from packhorse.parallel.split import Sharding
from packhorse.planning.persistent import ALIGNMENT, Persistent, Run, divided, like, make_run, shard_of

WORDS = ("whole", "split")  # in the names of runs, where some parameters are cut over tp ranks and some are not


@dataclass(frozen=True)
class Owned:
    """A run of parameters that one parameter group updates, and its gradients: each at the element offset of its parameter, in any float dtype.

    params: what the optimizer works on, the master weights where there are any. states: name -> run with the slots of `params`.
    numbers: name -> run with one number for each parameter, in order. copies: 16-bit parameters that the update keeps equal to `params`.
    sharded: it updates its own shard of all of these (P_os), else the whole runs.
    """

    group: int
    params: Run
    grads: Run
    states: dict[str, Run]
    numbers: dict[str, Run]
    copies: Run | None
    sharded: bool = False


@dataclass(frozen=True)
class Widths:
    """How many bits the step computes in, keeps gradients in (None: as it computes), and whether the loss is scaled against underflow."""

    compute: torch.dtype | None = None
    grads: torch.dtype | None = None
    scaled: bool = False


def widths_of(model: torch.nn.Module, precision: str, grad_dtype: torch.dtype | None) -> Widths:
    """Of words and a dtype as `packhorse.plan` takes them. Raises UserError for what is none, and for parameters that would lose bits."""
    if precision not in PRECISIONS:
        raise UserError(f"precision={precision!r} is not known; expected one of {', '.join(PRECISIONS)} (fp32 keeps the model's own dtype)")
    if grad_dtype is not None and (not isinstance(grad_dtype, torch.dtype) or not grad_dtype.is_floating_point or grad_dtype.itemsize < 2):
        raise UserError(f"grad_dtype={grad_dtype!r}: expected a floating-point dtype such as torch.float32, or None to keep gradients as they come")
    compute = PRECISIONS[precision]
    other = next((n for n, p in model.named_parameters() if compute is not None and is_narrow(p.dtype) and p.dtype != compute), None)
    if other is not None:
        raise UserError(
            f"precision={precision!r}, but the parameter {other!r} is {model.get_parameter(other).dtype}, which would lose bits in it; give a "
            "float32 model (model.float()), or choose the precision that it has"
        )
    return Widths(compute, grad_dtype, scaled=compute is torch.float16)


def flat_storage(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    captured: Captured,
    clip_norm: float | None,
    widths: Widths,
    partition: Partition | None = None,
    sharding: Sharding | None = None,
    states_on_host: bool = False,
) -> tuple[Persistent, list[Owned]]:
    """Every run of persistent storage, and those that the optimizer updates. states_on_host: its states lie on the host, with master weights.

    Parameters with the same (dtype, computed dtype, requires_grad, has a gradient, parameter group) share a run, in the model's order; with a
    partition, those of the same unit; with a sharding, those that are cut over the tp ranks, or those that every rank has whole.
    """
    trained = captured.trained()
    group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    bundles: dict[tuple, list[tuple[str, Value]]] = {}
    parameters = distinct(model.named_parameters(remove_duplicate=False))
    parts = _parts(parameters, sharding)
    for name, param in parameters.items():
        group = group_of.get(id(param))
        unit = partition.units[name] if partition else ""
        key = (param.dtype, computed_dtype(param, widths.compute), param.requires_grad, name in trained, group, unit, name in parts)
        bundles.setdefault(key, []).append((name, _value(name, param, parts.get(name))))
    runs, owned = [], []
    for (own, computed, requires_grad, has_grad, group, unit, is_split), tensors in bundles.items():
        label = (
            f"{SHORT[own]}."
            + (f"g{group}" if group is not None else "nogroup")
            + ("" if requires_grad else ".frozen")
            + ("" if has_grad or not requires_grad else ".unused")
            + (f".{WORDS[is_split]}" if sharding else "")
            + (f".{unit}" if partition else "")
        )
        updated = has_grad and group is not None
        master = own if own != computed else torch.float32 if updated and widths.compute is not None and is_narrow(own) else None
        grads = (widths.grads or computed) if has_grad else computed
        # the same element offsets in every run, each of them aligned in the narrowest
        align = ALIGNMENT // min(dtype.itemsize for dtype in (own, computed, master or own, grads))
        first = make_run(f"param.{label}", "parameters", "param", tensors, align, parts)
        if partition:
            first = divided(first, partition.num_ranks, partition.rank, align)
        params = _held(like(first, first.name, "parameters", "param", SHORT[computed]), partition, 3)
        runs.append(params)
        works_on = params
        if master is not None:
            works_on = _held(like(first, f"master.{label}", "master weights", "master", SHORT[master]), partition, 1)
            works_on = replace(works_on, on_host=states_on_host and updated)
            runs.append(works_on)
        if not has_grad:
            continue
        gradients = _held(like(first, f"grad.{label}", "gradients", "grad", SHORT[grads]), partition, 2)
        runs.append(gradients)
        if group is None:
            continue
        needs = describe(optimizer).needs_of(optimizer.param_groups[group])
        states = {s: _held(like(works_on.layout, f"{s}.{label}", "optimizer states", "state"), partition, 1) for s in needs.states}
        numbers = {n: _numbers(f"{n}.{label}", len(tensors), optimizer.param_groups[group]) for n in needs.kept_numbers}
        states, numbers = ({name: replace(run, on_host=states_on_host) for name, run in runs.items()} for runs in (states, numbers))
        runs += [*states.values(), *numbers.values()]
        copies = params if master is not None and (own == computed or partition) else None
        owned.append(Owned(group, works_on, gradients, states, numbers, copies, partition is not None and partition.shards_states))
    runs += _by_dtype("buffer", "buffers", "buffer", [(n, _value(n, b)) for n, b in distinct(model.named_buffers(remove_duplicate=False)).items()])
    runs += _by_dtype("constant", "constants", "constant", _constants(captured))
    runs += _by_dtype("metric", "metrics", "metric", _metrics(captured, owned, clip_norm, widths.scaled, partition))
    return Persistent(tuple(runs)), owned


def _held(run: Run, partition: Partition | None, stage: int) -> Run:
    """What this rank holds of a run that is sharded from `stage` on."""
    return shard_of(run) if partition and partition.num_ranks > 1 and partition.stage >= stage else run


def _numbers(name: str, count: int, group: dict) -> Run:
    """One number for each of `count` parameters, in the dtype that torch.optim gives its step counts."""
    dtype = "f64" if torch.get_default_dtype() == torch.float64 and not is_fused(group) else "f32"
    return make_run(name, "optimizer states", "state", [(name, Value(name, dtype, (count,), (1,)))])


def _constants(captured: Captured) -> list[tuple[str, Value]]:
    return [(i.target, i.value) for i in captured.micro.inputs if i.role == "constant"]


def _metrics(captured: Captured, owned: list[Owned], clip_norm: float | None, scaled: bool, partition: Partition | None) -> list[tuple[str, Value]]:
    """loss; losses, of every data parallel rank, where there are several; grad_norm where something is made of it; clip_coefficient; inverse_scale,
    what gradients are multiplied by against the loss scale, and grad_factor, both factors in one."""
    loss = next(captured.micro.values[o.name] for o in captured.micro.outputs if o.role == "metric")
    norm = norm_dtype(captured, owned)
    names = ["grad_norm"] * (clip_norm is not None or scaled) + ["clip_coefficient"] * (clip_norm is not None)
    names += ["inverse_scale"] * scaled + ["grad_factor"] * (scaled and clip_norm is not None)
    every = [("losses", Value("losses", loss.dtype, (partition.num_ranks,), (1,)))] if partition and partition.num_ranks > 1 else []
    return [("loss", Value("loss", loss.dtype, (), ())), *every, *((name, Value(name, norm, (), ())) for name in names)]


def norm_dtype(captured: Captured, owned: list[Owned]) -> str:
    """The widest dtype among the gradients and what the optimizer works on."""
    dtypes = {captured.micro.values[o.name].dtype for o in captured.micro.outputs if o.role == "grad"} | {item.params.dtype for item in owned}
    return max(dtypes, key=lambda d: ITEMSIZE[d])


def _by_dtype(name: str, kind: str, role: str, tensors: list[tuple[str, Value]]) -> list[Run]:
    bundles: dict[str, list[tuple[str, Value]]] = {}
    for target, value in tensors:
        bundles.setdefault(value.dtype, []).append((target, value))
    return [make_run(f"{name}.{dtype}", kind, role, group) for dtype, group in bundles.items()]


def _value(name: str, tensor: torch.Tensor, part: Part | None = None) -> Value:
    if part is not None:
        return Value(name, SHORT[tensor.dtype], part.local_shape, part.local_strides)
    return Value(name, SHORT[tensor.dtype], tuple(tensor.shape), dense_strides(tensor))


def _parts(parameters: dict[str, torch.Tensor], sharding: Sharding | None) -> dict[str, Part]:
    """Of the parameters that are cut, what this rank has."""
    if sharding is None:
        return {}
    return {
        name: part_of(tuple(parameters[name].shape), dense_strides(parameters[name]), split, sharding.degree, sharding.rank)
        for name, split in sharding.splits.items()
    }
