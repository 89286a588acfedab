"""Program -> run: binds every operand to memory once, then a step is a straight list of kernel calls. The only code that touches the device.

What lies in the arena or in persistent storage never moves, so those tensors are made when a program is bound. What a kernel allocates itself
(external slots) and the caller's batch are looked up while it runs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from packhorse.capture.dtypes import LONG, from_const
from packhorse.errors import CheckError, PeerError, UserError
from packhorse.graph.ir import Const
from packhorse.graph.operators import is_collective, is_copy, is_tensor_collective
from packhorse.parallel.tensor.spread import STREAMS
from packhorse.planning.placement import same_layout
from packhorse.program.program import Call, Copy, Instruction, Operand, Program
from packhorse.runtime.arena import ALIGNMENT, Arena
from packhorse.runtime.collectives import call_of_collective
from packhorse.runtime.copies import CopyEngine
from packhorse.runtime.kernels import call_of, overload, takes_generator
from packhorse.runtime.optimizers import LiveGroup
from packhorse.runtime.random import drawing_as, drawing_from
from packhorse.runtime.transport import Transport
from packhorse.units import align_up


@dataclass
class Measured:
    """What one run of a program took: arena bytes up to the highest one written (rounded up to the alignment), and adopted bytes at their peak;
    of the host's pool as of the arena."""

    arena_bytes: int = 0
    external_bytes: int = 0
    host_bytes: int = 0


def tensor_at(storage: Tensor, operand: Operand) -> Tensor:
    """The operand as a view of the bytes of `storage` (a tensor that starts where the operand's space starts)."""
    dtype = LONG[operand.dtype]
    start = storage.storage_offset() * storage.element_size() + operand.offset
    assert start % dtype.itemsize == 0
    view = torch.empty(0, dtype=dtype, device=storage.device)
    return view.set_(storage.untyped_storage(), start // dtype.itemsize, operand.shape, operand.strides)


class BoundProgram:
    """A program over given memory. runs: run name -> byte tensor. groups: the optimizer's parameter groups, read at every step.
    generators: those that its Consts name. axes: axis of the mesh -> the transport over it; "host" -> what copies there. host: the pool of what waits
    there."""

    def __init__(
        self,
        program: Program,
        arena: Arena,
        runs: dict[str, Tensor],
        groups: list[LiveGroup],
        generators: dict[str, Generator] | None = None,
        axes: Mapping[str, Transport | CopyEngine] | None = None,
        host: Arena | None = None,
    ):
        self.host = host
        self.program, self.arena, self.runs, self.groups, self.generators = program, arena, runs, groups, generators or {}
        self.axes = axes or {}
        self.slots: dict[str, Tensor] = {}
        self.batch: dict[str, Tensor] = {}
        self.live = self.peak = 0
        self.seen_high_water: int | None = None
        self.seen_on_host = 0
        self.differences: dict[str, tuple[int, int]] = {}  # adopted value -> (planned, measured) bytes, where they are not the same
        self.steps: list[Callable[[], Any]] = [self._bind(instruction) for instruction in program.instructions]

    def run(self, batch: dict[str, Tensor]) -> Measured:
        """One run on the given batch leaves."""
        self.batch.update(batch)
        self.live = self.peak = 0
        height, floor, watch_all = self.program.end, self.program.floor, self.seen_high_water is None
        self.arena.fill(height, watch_all, floor)
        on_host = self.program.host_bytes
        if self.host is not None and on_host:
            self.host.fill(on_host, watch_all)
        done = 0
        try:
            with torch.inference_mode():
                for step in self.steps:
                    step()
                    done += 1
        except PeerError:
            raise
        except (IndexError, RuntimeError, ValueError) as error:
            raise UserError(self._failure(done, error)) from error
        finally:
            if done < len(self.steps):
                self.slots.clear()
                self.batch.clear()
                for transport in self.axes.values():
                    transport.drop()
        high = self.arena.high_water(height, watch_all, floor)
        if watch_all:
            self.seen_high_water = align_up(high or floor, ALIGNMENT)
        assert self.seen_high_water is not None
        if self.host is not None and on_host:
            seen = self.host.high_water(on_host, watch_all)
            if seen is not None:
                self.seen_on_host = align_up(seen, ALIGNMENT)
        self.batch.clear()
        return Measured((self.seen_high_water if high is None else align_up(high, ALIGNMENT)) - floor, self.peak, self.seen_on_host)

    def _failure(self, index: int, error: Exception) -> str:
        instruction = self.program.instructions[index]
        op, module, source = (instruction.op, instruction.module, instruction.source) if isinstance(instruction, Call) else ("copy", "", "")
        advice = "look at the batch's values (an index or a label outside its range, for example)"
        if "dtype" in str(error) or "expected scalar type" in str(error):
            dtypes = ", ".join(f"{name} {str(tensor.dtype).removeprefix('torch.')}" for name, tensor in self.batch.items())
            advice = f"the dtypes of batch and parameters do not go together (batch: {dtypes}): convert the batch and plan again"
        return (
            f"{op} failed in module {module or '(outermost)'!r} at {source or 'an unknown line'}: "
            f"{str(error).strip().splitlines()[0]}; no parameter was changed "
            f"unless this is the update; if plain PyTorch runs this batch, that is a fault of packhorse; otherwise {advice}"
        )

    # -- binding --------------------------------------------------------------------------------------------------------------------

    def _bind(self, instruction: Instruction) -> Callable[[], Any]:
        if isinstance(instruction, Copy):
            call = self._bound(Tensor.copy_, (instruction.target, instruction.source), {})
        else:
            kwargs: dict[str, Any] = dict(instruction.kwargs)
            state = kwargs.pop("state", None)
            stream = given.name if isinstance(given := kwargs.get("generator"), Const) and given.name in STREAMS else None
            if stream is not None:  # its call draws from the default generator
                del kwargs["generator"]
                kwargs |= {"generator": None} if takes_generator(instruction.op) else {}
            if "group" in kwargs:
                kwargs["hyper"] = self.groups[kwargs.pop("group")]
            if is_copy(instruction.op) or is_collective(instruction.op) or is_tensor_collective(instruction.op):
                transport, scratch = self.axes[kwargs["axis"]], instruction.scratch
                call = self._bound(*call_of_collective(instruction.op, instruction.outputs, instruction.args, kwargs, transport, scratch))
            elif instruction.adopts:
                call = self._bound(overload(instruction.op), instruction.args, kwargs)
            else:
                call = self._bound(*call_of(instruction.op, instruction.outputs, instruction.scratch, instruction.args, kwargs))
            if state is not None:
                call = self._redrawing(call, state, self._getter(kwargs.get("generator")))
            elif stream is not None:
                call = _drawing_as(self.generators[stream], call)
            if instruction.adopts:
                return self._adopting(call, instruction)
        return self._freeing(call, instruction.frees) if instruction.frees else call

    def _redrawing(self, call: Callable[[], Any], state: Operand, generator: Generator | None) -> Callable[[], Any]:
        """A mirror of a draw: it draws again what its original drew."""
        saved = self._operand(state)

        def redraw() -> Any:
            with drawing_from(saved, generator):
                return call()

        return redraw

    def _bound(self, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Callable[[], Any]:
        """A call without arguments: its tensors are made now where they never move, and looked up at run time where they do."""
        getters = [self._getter(arg) for arg in args]
        keyed = {key: self._getter(arg) for key, arg in kwargs.items()}
        if not any(isinstance(g, _Late) for g in [*getters, *keyed.values()]):
            return partial(function, *getters, **keyed)

        late = [isinstance(g, _Late) for g in getters]
        fixed = {key: g for key, g in keyed.items() if not isinstance(g, _Late)}
        moving = {key: g for key, g in keyed.items() if isinstance(g, _Late)}

        def call() -> Any:
            return function(*(g.get() if is_late else g for g, is_late in zip(getters, late)), **fixed, **{k: g.get() for k, g in moving.items()})

        return call

    def _getter(self, arg: Any) -> Any:
        """The argument itself, or a _Late if any part of it moves."""
        if isinstance(arg, Operand):
            return self._operand(arg)
        if isinstance(arg, Const):
            return self.generators[arg.name] if arg.kind == "generator" else from_const(arg)
        if isinstance(arg, tuple):
            items = [self._getter(item) for item in arg]
            if any(isinstance(item, _Late) for item in items):
                return _Late(lambda: [item.get() if isinstance(item, _Late) else item for item in items])
            return items
        return arg

    def _operand(self, operand: Operand) -> Any:
        if operand.space == "arena":
            return tensor_at(self.arena.data, operand)
        if operand.space == "host":
            assert self.host is not None
            return tensor_at(self.host.data, operand)
        if operand.space == "hollow":
            return tensor_at(self.arena.hollow, operand)
        if operand.space == "persistent":
            return tensor_at(self.runs[operand.key], operand)
        table, key = (self.slots if operand.space == "external" else self.batch), operand.key
        if operand.value == operand.root and (operand.space == "batch" or key == operand.root):
            return _Late(lambda: table[key])
        shape, strides, dtype = operand.shape, operand.strides, LONG[operand.dtype]
        elements = operand.offset // dtype.itemsize

        def look() -> Tensor:
            held = table[key]
            if held.dtype is not dtype:
                return tensor_at(held, operand)
            return held.as_strided(shape, strides, held.storage_offset() + elements)

        return _Late(look)

    def _adopting(self, kernel: Callable[[], Any], instruction: Call) -> Callable[[], Any]:
        outputs, frees, slots = instruction.outputs, instruction.frees, self.slots

        def call() -> None:
            results = kernel()
            if isinstance(results, Tensor):
                results = (results,)
            for operand, result in zip(outputs, results or ()):
                if operand is not None and result is None:  # a gradient that the kernel saw nobody asked for
                    slots[operand.key] = torch.empty(0)
                elif operand is not None:
                    slots[operand.key] = kept = _as_planned(result, operand)
                    size = kept.untyped_storage().nbytes()
                    self.live += size
                    if size != operand.extent_bytes:
                        self.differences[operand.value] = (operand.extent_bytes, size)
            del results
            if self.live > self.peak:
                self.peak = self.live
            for name in frees:
                self.live -= slots.pop(name).untyped_storage().nbytes()

        return call

    def _freeing(self, call: Callable[[], Any], frees: tuple[str, ...]) -> Callable[[], Any]:
        slots = self.slots

        def run_and_free() -> None:
            call()
            for name in frees:
                self.live -= slots.pop(name).untyped_storage().nbytes()

        return run_and_free


def _drawing_as(stream: Generator, call: Callable[[], Any]) -> Callable[[], Any]:
    def draw() -> Any:
        with drawing_as(stream):
            return call()

    return draw


class _Late:
    """An argument that is looked up when the program runs."""

    __slots__ = ("get",)

    def __init__(self, get: Callable[[], Any]):
        self.get = get


def _as_planned(result: Tensor, operand: Operand) -> Tensor:
    """The kernel's own result; laid out anew where its strides are not those that the capture saw on fake tensors, or where it holds on to more
    memory than its own elements (some operators return a part of a larger allocation, or of their argument)."""
    if result.shape != operand.shape or result.dtype != LONG[operand.dtype]:
        planned = f"{operand.dtype}{list(operand.shape)}"
        raise CheckError(f"%{operand.value}: planned as {planned}, but the kernel returned {result.dtype} of shape {list(result.shape)}")
    same = same_layout(operand.shape, tuple(result.stride()), operand.strides) or result.numel() <= 1
    if same and result.untyped_storage().nbytes() <= operand.extent_bytes:
        return result
    return torch.empty_strided(operand.shape, operand.strides, dtype=result.dtype, device=result.device).copy_(result)
