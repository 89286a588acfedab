"""torch -> one joint graph of forward and backward, as torch.fx nodes.

`aot_export_joint_with_descriptors` runs the model once on fake tensors, lets autograd record its own backward formulas, and leaves
no operator that writes into its arguments. Nothing is allocated, no random number drawn, and the model may live on the meta device.
Parameters are handed in as plain inputs, one for each distinct tensor, so that a tied weight has one gradient.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses import FakeTensorMode
from torch.fx.traceback import preserve_node_meta

from packhorse.capture.batch import call, replace_tensors, signature, tensors_of
from packhorse.capture.dtypes import SHORT
from packhorse.capture.generators import Generators
from packhorse.capture.location import Location, user_line_of
from packhorse.capture.native import native_operators
from packhorse.capture.precision import computed_dtype, computing_in
from packhorse.capture.questions import NO_QUESTIONS, Questioner, Questions
from packhorse.capture.substitute import substituted
from packhorse.errors import CaptureError
from packhorse.graph.ir import Value, contiguous_strides

# What a user's model can raise while it is run on fake tensors.
_MODEL_ERRORS = (RuntimeError, SyntaxError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError, AssertionError, ArithmeticError)

_DATA_DEPENDENT = ("DataDependentOutputException", "GuardOnDataDependentSymNode", "DynamicOutputShapeException")


@dataclass(frozen=True)
class Trace:
    """The fx graph, what each of its inputs is: ("param" | "buffer" | "batch", name), in placeholder order, and what the model asked of its batch.

    generators: name -> each one that the model has or draws from. marks: (module, source) of each call of a mark.
    """

    module: torch.fx.GraphModule
    inputs: tuple[tuple[str, str], ...]
    questions: Questions = NO_QUESTIONS
    generators: dict[str, torch.Generator] = field(default_factory=dict)
    marks: frozenset[tuple[str, str]] = frozenset()


def distinct(named: Any) -> dict[str, torch.Tensor]:
    """First name -> tensor, for each distinct tensor of an iterator over (name, tensor)."""
    seen: dict[int, str] = {}
    found = {}
    for name, tensor in named:
        if id(tensor) not in seen:
            seen[id(tensor)] = name
            found[name] = tensor
    return found


def device_of(model: torch.nn.Module) -> torch.device:
    """The device that the step will run on: the parameters' own; the CPU for a model on meta."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")


@torch.inference_mode(False)
def trace(model: torch.nn.Module, batch: Any, loss: Callable | None, with_gradients: bool, compute: torch.dtype | None = None) -> Trace:
    """One micro-batch's forward, and backward if `with_gradients`, as one functional fx graph. compute: see capture/precision.py.

    Raises CaptureError naming the module and the line where the model cannot be run on fake tensors.
    """
    generators = Generators(model)
    location = Location(generators, marking=with_gradients)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    step = on_fake_tensors(mode, model, batch, loss, with_gradients, compute, location)

    # torch writes the traceback of a failure on fake tensors to its log, before we can say it in one paragraph
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level, log.level = log.level, logging.CRITICAL
    try:
        with ExitStack() as stack, native_operators(), preserve_node_meta(), torch.set_grad_enabled(with_gradients):
            stack.enter_context(drawing_nothing(model))
            stack.enter_context(generators.at_rest())
            joint = aot_export_joint_with_descriptors(stack, step.call, step.fakes)
            module = joint.graph_module
    except CaptureError:
        raise
    except _MODEL_ERRORS as error:
        in_loss = loss is not None and _passed(error.__traceback__, loss_of)
        raise CaptureError(_explain(error, location.failed_module, in_loss)) from error
    finally:
        log.level = level
    if location.drawing_module is not None:
        raise CaptureError(
            f"the training step cannot be captured: module {location.drawing_module or '(outermost)'!r} draws random numbers from Python's or "
            "numpy's generator, which would be drawn once and then stay the same at every step; draw with torch (torch.rand), or make the draw "
            "part of the batch"
        )
    return Trace(module, step.inputs, step.asked[-1], generators.named, frozenset(location.marks))


@dataclass(frozen=True)
class OnFakes:
    """A micro-batch's forward as `call(*fakes)`, without memory. inputs: as in Trace, of each fake tensor. asked: of each time that `call` ran."""

    call: torch.nn.Module
    fakes: tuple[torch.Tensor, ...]
    inputs: tuple[tuple[str, str], ...]
    asked: list[Questions]


def on_fake_tensors(
    mode: FakeTensorMode,
    model: torch.nn.Module,
    batch: Any,
    loss: Callable | None,
    with_gradients: bool,
    compute: torch.dtype | None,
    location: Location,
) -> OnFakes:
    """The forward pass on fake tensors of `mode`, its calls seen by `location`. Nothing is run yet."""
    params = distinct(model.named_parameters(remove_duplicate=False))
    buffers = distinct(model.named_buffers(remove_duplicate=False))
    originals = [*params.values(), *buffers.values()]
    device = device_of(model)
    asked: list[Questions] = []
    with mode:
        fakes = [_fake(p, computed_dtype(p, compute), device, with_gradients and p.requires_grad) for p in params.values()]
        fakes += [_fake(b, b.dtype, device, False) for b in buffers.values()]
        # the batch stays the caller's, with whatever strides it has; parameters and buffers move to storage of ours
        fakes += [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in tensors_of(batch)]

    class Call(torch.nn.Module):
        """The step as a module without parameters of its own."""

        def forward(self, *flat: torch.Tensor) -> torch.Tensor:
            exchange = {id(tensor): given for tensor, given in zip(originals, flat)}
            rebuilt = replace_tensors(batch, list(flat[len(originals) :]))
            questioner = Questioner(list(flat[len(originals) :]), tensors_of(batch), device)
            forward = location.generators.forward()
            with substituted(model, exchange), forward, location.inside(model), questioner, computing_in(compute, device.type):
                found = loss_of(call(model, rebuilt), rebuilt, loss)
                found = found if compute is None else found.float()
            asked.append(questioner.questions())
            return found

    roles = [("param", name) for name in params] + [("buffer", name) for name in buffers]
    roles += [("batch", leaf.path) for leaf in signature(batch).leaves]
    return OnFakes(Call(), tuple(fakes), tuple(roles), asked)


def drawing_nothing(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Around a run on fake tensors: some operators draw even there, and planning must not."""
    device = device_of(model)
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def loss_of(output: Any, batch: Any, loss: Callable | None) -> torch.Tensor:
    """The scalar loss: loss(output, batch), the scalar output, or the output's `.loss`."""
    returned = loss(output, batch) if loss is not None else output
    found = returned
    if not isinstance(found, torch.Tensor):
        found = found.get("loss") if isinstance(found, dict) else getattr(found, "loss", None)
    if not isinstance(found, torch.Tensor) or found.numel() != 1 or not found.is_floating_point():
        seen = (
            f"{str(found.dtype).removeprefix('torch.')} of shape {list(found.shape)}" if isinstance(found, torch.Tensor) else type(returned).__name__
        )
        if loss is not None:
            raise CaptureError(f"the loss function returned {seen}, expected a floating-point scalar: one loss for the whole batch, such as a mean")
        unlabelled = isinstance(batch, dict) and bool({"input_ids", "pixel_values"} & batch.keys()) and "labels" not in batch
        hint = "; the batch has no labels, and many models give a loss only with them: add labels to it" if unlabelled else ""
        raise CaptureError(
            f"the model's output is no scalar loss and has no scalar `.loss`: seen {seen}{hint}; return the loss from forward, or pass "
            "loss=function(output, batch) that returns a floating-point scalar"
        )
    return found if found.dim() == 0 else found.reshape(())


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's strides if each of its bytes belongs to one element (contiguous, channels last, transposed); else row-major ones."""
    value = Value("", SHORT[tensor.dtype], tuple(tensor.shape), tuple(tensor.stride()))
    return value.strides if value.is_dense else contiguous_strides(value.shape)


def _fake(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device, requires_grad: bool) -> torch.Tensor:
    """A tensor without memory on `device`; a non-dense layout (an expanded tensor) becomes the contiguous one that the runtime will hold."""
    fake = torch.empty_strided(tensor.shape, dense_strides(tensor), dtype=dtype, device=device)
    return fake.requires_grad_() if requires_grad else fake


def _passed(trace: TracebackType | None, function: Callable) -> bool:
    """Whether an exception's traceback goes through `function`."""
    while trace is not None:
        if trace.tb_frame.f_code is function.__code__:
            return True
        trace = trace.tb_next
    return False


def _explain(error: BaseException, module: str | None, in_loss: bool) -> str:
    """in_loss: the error came out of the caller's loss function, not the model."""
    kind = type(error).__name__
    where = "in the loss function" if in_loss else f"in module {module!r}" if module else "in the outermost module"
    line = user_line_of(error.__traceback__)
    place = f"{where}, at {line}" if line else where
    text = str(error).strip().splitlines()[0] if str(error).strip() else kind
    if kind in _DATA_DEPENDENT or "data-dependent" in str(error) or "aten._local_scalar_dense" in str(error):
        return (
            f"the training step cannot be captured: {place}, the code looks at the values inside a tensor ({text}); a plan must hold for every "
            "batch, so replace .item(), bool(tensor), nonzero() and shapes that depend on data by torch.where, masks or a fixed size; yes-or-no "
            "questions may be asked of the batch's whole numbers and truth values (masks, ids), not of floats or activations"
        )
    if "mirrored meta" in text:  # what torch says of backward() on its fake tensors
        return (
            f"the training step cannot be captured: {place}, the code calls backward(), and a step runs the backward pass of the loss itself, once; "
            "return the loss instead (the sum of several, if there are several); gradients that belong to the loss are "
            "torch.autograd.grad(..., create_graph=True)"
        )
    if in_loss:
        said = f"the loss function raised {kind}{f' at {line}' if line else ''}: {text}; it is called as loss(output, batch)"
    else:
        said = f"{place}, the model raised {kind}: {text}"
    if isinstance(error, NotImplementedError) or kind.startswith("Unsupported"):
        advice = ": if it fails there too, mend it there; if it works, replace this line by operators with shapes that do not depend on data"
    else:
        advice = " and mend it there; if it works there, it cannot be captured as it is"
    what = "model and loss" if in_loss else "the model"
    return f"the training step cannot be captured: {said}; run {what} once in plain PyTorch on this batch{advice}"
