"""What a model's forward does, as a log of its calls of torch functions: a Graph whose nodes are calls, at a small part of a capture's cost.

A call is written down with its arguments, the tensors that it reads by what made them, how its results lie, the operators that it came down to,
and what of torch's state decides what it does (gradients on or off, autocast). Two forwards with the same log compute the same graph, backward
included: what autograd records and how a call comes down to operators follow from exactly these. What the log could not tell apart it refuses.

A long log is cheap as well: while nothing is written to, a call like an earlier one is not run again but answered with tensors like those it gave.
"""

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from packhorse.capture.dtypes import SHORT, to_const
from packhorse.capture.generators import Generators
from packhorse.capture.leaves import leaves
from packhorse.capture.location import Location, host_random_state, place_of, user_line
from packhorse.capture.native import native_operators
from packhorse.capture.questions import ABOUT, Questions
from packhorse.capture.trace import device_of, drawing_nothing, on_fake_tensors
from packhorse.graph.ir import Arg, Const, Graph, Input, Node, Output, Ref, Value, refs_in

# Tensors from outside of the model are compared by their contents, up to this size.
MOST_BYTES = 1 << 26

# What these do is not seen in the calls that follow.
_HIDDEN = ("register_hook", "register_post_accumulate_grad_hook", "backward", "grad_fn.__get__", "grad.__get__", "_backward_hooks.__get__", "__set__")


class Unseen(Exception):
    """A log could not tell this forward from one that does something else."""


class _Written(Exception):
    """A call wrote into a tensor."""


@dataclass(frozen=True)
class Calls:
    """graph: inputs are parameters, buffers and the batch, nodes calls, the output the loss. writes: whether some call wrote into a tensor."""

    graph: Graph
    writes: bool
    questions: Questions


def calls_of(model: torch.nn.Module, batch: Any, loss: Callable | None, with_gradients: bool, compute: torch.dtype | None) -> Calls:
    """The log of one micro-batch's forward, on tensors without memory. The model is left as it is.

    Raises Unseen where the log would not tell all, and whatever the model raises.
    """
    try:
        return _run(model, batch, loss, with_gradients, compute, from_memory=True)
    except _Written:
        return _run(model, batch, loss, with_gradients, compute, from_memory=False)


@torch.inference_mode(False)
def _run(model: torch.nn.Module, batch: Any, loss: Callable | None, with_gradients: bool, compute: torch.dtype | None, from_memory: bool) -> Calls:
    generators = Generators(model)
    if generators.named:
        raise Unseen("generators of the model's own")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    operators = _Operators()
    log = _Log(generators, mode, operators, device_of(model), from_memory)
    step = on_fake_tensors(mode, model, batch, loss, with_gradients, compute, log)
    for fake, (role, target) in zip(step.fakes, step.inputs):
        log.give(fake, role, target)
    with ExitStack() as stack, native_operators(), torch.set_grad_enabled(with_gradients):
        stack.enter_context(drawing_nothing(model))
        stack.enter_context(generators.at_rest())
        stack.enter_context(log.own_functions())
        stack.enter_context(mode)
        stack.enter_context(operators)
        found = step.call(*step.fakes)
    if log.drawing_module is not None:
        raise Unseen("numbers drawn by Python or numpy")
    outputs = [Output(log.known(found), "metric", "loss"), *log.replaced]
    return Calls(Graph("calls", tuple(log.inputs), tuple(log.nodes), tuple(outputs)), log.wrote, step.asked[-1])


class _Operators(TorchDispatchMode):
    """Counts the operators that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):  # torch itself asks for it, many times
            return args[0].fake_device
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class _Made:
    """The results of a call, to make others like them: how each lies, without memory."""

    kind: type  # Tensor, tuple or list
    lies: tuple[tuple[torch.Tensor, bool] | int, ...]  # or which of the tensors given it is
    operators: tuple


class _Log(Location):
    """Writes down every call."""

    def __init__(self, generators: Generators, mode: FakeTensorMode, operators: _Operators, device: torch.device, from_memory: bool):
        super().__init__(generators, marking=True)
        self.mode, self.operators, self.device, self.from_memory = mode, operators, device, from_memory
        self.inputs: list[Input] = []
        self.nodes: list[Node] = []
        self.replaced: list[Output] = []  # buffers that the forward exchanged for other tensors
        self.wrote = False
        self.names: dict[int, tuple[str, torch.Tensor]] = {}  # by id; a tensor in here does not die, so that no other takes its id
        self.lies: dict[str, tuple] = {}  # name -> how its tensor lay when it was made
        self.outside: dict[int, tuple[Arg, torch.Tensor]] = {}
        self.functions: dict[Any, str] = {}
        self.memory: dict[Any, _Made] = {}

    # -- before and after -----------------------------------------------------------------------------------------------------------

    def give(self, tensor: torch.Tensor, role: str, target: str) -> None:
        """Makes an input of the log known."""
        value = self._name(tensor, f"{role}.{target}")
        self.inputs.append(Input(value, role, target))

    @contextmanager
    def own_functions(self) -> Iterator[None]:
        """Refuses functions whose backward is the model's own: it is not seen in the calls."""

        def apply(cls, *args, **kwargs):
            raise Unseen(f"an autograd.Function, {cls.__name__}")

        kept = torch.autograd.Function.__dict__["apply"]
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.autograd.Function.apply = kept  # type: ignore[method-assign]

    @contextmanager
    def inside(self, model: torch.nn.Module) -> Iterator[None]:
        before = host_random_state()
        self.drawing_module = ""  # it is not asked after each module which one it was, only whether there is one
        with super().inside(model):
            given = {name: id(buffer) for name, buffer in model.named_buffers(remove_duplicate=False)}
            yield
        self.drawing_module = "" if host_random_state() != before else None
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if given.get(name) != id(buffer):
                self.replaced.append(Output(self.known(buffer), "buffer", name))

    # -- one call -------------------------------------------------------------------------------------------------------------------

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in ABOUT or not torch._C._len_torch_dispatch_stack():  # without modes: what is computed for real, beside the trace
            return func(*args, **kwargs)
        module, source = self.path[-1], user_line(sys._getframe(1))
        _, _, generator = self.generators.hide(args, kwargs, place_of(module, source))
        if generator is not None:
            raise Unseen("a generator of the model's own")
        name = self._function(func)
        given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        said = self._arg(args), tuple((key, self._arg(value)) for key, value in kwargs.items())
        state = self._state()
        key = None
        if self.from_memory:
            key = func, tuple(self.lies.get(n) for n in (*refs_in(said[0]), *refs_in(said[1]))), _without_refs(said), state
            made = self.memory.get(key)
            if made is not None:
                result = self._again(made, given)
                self._write_down(name, said, module, source, state, leaves(result), made.operators, ())
                return result
        versions = [_version(tensor) for tensor in given]
        self.operators.seen = Counter()
        result = func(*args, **kwargs)
        operators = tuple(sorted(self.operators.seen.items()))
        written = tuple(tensor for tensor, version in zip(given, versions) if _version(tensor) != version)
        if written and self.from_memory:
            raise _Written
        results = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
        if results or written:
            before = {id(tensor): place for place, tensor in reversed([*enumerate(given)])}
            fresh = [id(tensor) in before or id(tensor) not in self.names for tensor in results]
            self._write_down(name, said, module, source, state, results, operators, written)
            if key is not None and fresh and all(fresh) and type(result) in (FakeTensor, tuple, list) and len(leaves(result)) == len(results):
                with _disable_current_modes():
                    lies = tuple(before[id(t)] if id(t) in before else (_bare(t), t.requires_grad) for t in results)
                self.memory[key] = _Made(type(result), lies, operators)
        return result

    def _write_down(
        self, function: str, said: tuple, module: str, source: str, state: tuple, results: list, operators: tuple, written: tuple
    ) -> None:
        fresh: list[Value] = []
        gave: list[Arg] = []
        for tensor in results:
            if id(tensor) in self.names:
                name = self.names[id(tensor)][0]
                self._name(tensor, name)  # it may lie otherwise now, or require a gradient
                gave += [Ref(name), tensor.requires_grad, tuple(tensor.shape), tuple(tensor.stride())]
            else:
                fresh.append(self._name(tensor, f"{len(self.nodes)}.{len(fresh)}"))
                gave.append(tensor.requires_grad)
        self.wrote |= bool(written)
        kwargs: tuple = (
            *said[1],
            (".state", state),
            (".gave", tuple(gave)),
            (".wrote", tuple(Ref(self.known(tensor)) for tensor in written)),
            (".operators", operators),
        )
        self.nodes.append(Node(function, said[0], kwargs, tuple(fresh), "forward", module, source))

    def _again(self, made: _Made, given: list[torch.Tensor]) -> Any:
        tensors = []
        for lie in made.lies:
            if isinstance(lie, int):
                tensors.append(given[lie])
                continue
            bare, requires_grad = lie
            tensor = FakeTensor(self.mode, bare, self.device)
            tensors.append(tensor.requires_grad_() if requires_grad else tensor)
        return tensors[0] if made.kind is FakeTensor else made.kind(tensors)

    def _state(self) -> tuple:
        kind = self.device.type
        autocast = to_const(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise Unseen("hooks on saved tensors")
        return torch.is_grad_enabled(), autocast

    # -- names ----------------------------------------------------------------------------------------------------------------------

    def known(self, tensor: torch.Tensor) -> str:
        """The name of a tensor that a call made, or that was given."""
        if id(tensor) not in self.names:
            raise Unseen("a tensor that no call has made")
        return self.names[id(tensor)][0]

    def _name(self, tensor: torch.Tensor, name: str) -> Value:
        if tensor.layout is not torch.strided or tensor.dtype not in SHORT:
            raise Unseen("a tensor that is not dense")
        value = Value(name, SHORT[tensor.dtype], tuple(tensor.shape), tuple(tensor.stride()))
        self.names[id(tensor)] = name, tensor
        self.lies[name] = value.dtype, value.shape, value.strides, tensor.requires_grad, tensor.device
        return value

    def _function(self, func: Any) -> str:
        name = self.functions.get(func)
        if name is None:
            owner = getattr(func, "__self__", None)
            outer = f"{getattr(owner, '__name__', '')}." if hasattr(owner, "__get__") else ""
            name = f"{getattr(func, '__module__', '')}.{outer}{getattr(func, '__qualname__', str(func))}"
            if name.endswith(_HIDDEN) or (outer and name.endswith(tuple(f"{outer}method-wrapper.{part}" for part in _HIDDEN))):
                raise Unseen(name)
            self.functions[func] = name
        return name

    def _arg(self, arg: Any) -> Arg:
        """An argument as the graph can hold it."""
        if isinstance(arg, torch.Tensor):
            known = self.names.get(id(arg))
            return Ref(known[0]) if known is not None else self._from_outside(arg)
        if arg is None or isinstance(arg, (bool, int, float, str)):
            return arg
        if isinstance(arg, (tuple, list)):
            return tuple([self._arg(item) for item in arg])
        if isinstance(arg, slice):
            return "slice", self._arg(arg.start), self._arg(arg.stop), self._arg(arg.step)
        if arg is Ellipsis:
            return "..."
        if isinstance(arg, dict):
            return tuple((self._arg(key), self._arg(value)) for key, value in arg.items())
        const = to_const(arg)
        if const is None:
            raise Unseen(f"an argument of type {type(arg).__name__}")
        return const

    def _from_outside(self, tensor: torch.Tensor) -> Arg:
        """A tensor that the model holds besides parameters and buffers: what it contains."""
        found = self.outside.get(id(tensor))
        if found is None:
            said = contents(tensor)
            if said is None:
                raise Unseen("a tensor that no call has made")
            found = self.outside[id(tensor)] = said, tensor
        return found[0]


def contents(tensor: torch.Tensor) -> Const | None:
    """What makes two real tensors the same: how they lie, and their numbers. None for one without memory, or too large to look at."""
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta" or tensor.layout is not torch.strided:
        return None
    if tensor.numel() * tensor.element_size() > MOST_BYTES:
        return None
    with _disable_current_modes(), torch.no_grad():
        flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest = hashlib.blake2b(bytes(flat.untyped_storage())[: flat.numel()], digest_size=16).hexdigest()
    return Const("tensor", f"{tensor.dtype} {list(tensor.shape)} {list(tensor.stride())} {tensor.device} {tensor.requires_grad} {digest}")


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on meta that lies as this one does."""
    size = 1 + sum((dim - 1) * stride for dim, stride in zip(tensor.shape, tensor.stride()) if dim > 1) if tensor.numel() else 0
    storage = torch.empty(size + tensor.storage_offset(), dtype=tensor.dtype, device="meta")
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _without_refs(arg: Any) -> Any:
    """The argument with every tensor alike; kinds of numbers kept apart (1, 1.0 and True are equal as keys)."""
    if isinstance(arg, Ref):
        return Ref
    if isinstance(arg, tuple):
        return tuple([_without_refs(item) for item in arg])
    return arg if isinstance(arg, (str, Const)) else (type(arg), repr(arg))
