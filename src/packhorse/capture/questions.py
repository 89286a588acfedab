"""Yes-or-no questions that a model asks about its batch: `if mask.all():`, `torch.equal(ids, other)`.

A plan must hold for every batch, so a model may not look at values; but what it asks of the batch's own whole numbers (masks, ids, lengths) can be
answered while it is captured, and asked again of each batch before a step. So a program holds for one set of answers, and a batch
that gives other answers gets a program of its own.

While a model is traced, what it computes from those tensors alone is computed for real as well, call by call, beside the trace. Numbers taken out of
a tensor (`.item()` of anything but a truth value) would make sizes depend on data and stay refused.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from packhorse.capture.leaves import leaves

# Larger results (a mask of every pair of tokens is smaller) are not followed: nobody asks yes or no of them.
MOST_ELEMENTS = 1 << 24

# `bool(t)` arrives as Tensor.item from a trace, as itself from a forward on fake tensors alone
_ASKING = (
    Tensor.item,
    Tensor.__bool__,
    Tensor.__contains__,
    torch.equal,
    torch.allclose,
    torch.is_nonzero,
    Tensor.equal,
    Tensor.allclose,
    Tensor.is_nonzero,
)
# What these say follows from how a tensor lies.
ABOUT = {
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
    Tensor.is_floating_point,
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad", "layout")),
}
_IN_PLACE = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__".split()
)
_DATA = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Slot:
    """A tensor or a truth value of the recorded calls, by number."""

    number: int


@dataclass(frozen=True)
class Call:
    """results = function(*args, **kwargs); the tensors in args are Slots. results: slot numbers of its tensors, in order.

    autocast: (device type, dtype) where the model ran it under autocast.
    """

    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    results: tuple[int, ...]
    autocast: tuple[str, torch.dtype] | None

    def reads(self) -> set[int]:
        """Numbers of the slots among its arguments."""
        return {leaf.number for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Slot)}

    def run(self, held: dict[int, Any]) -> list[Any]:
        """Its results on what the slots hold, tensors and truth values alone."""
        args, kwargs = pytree.tree_map(lambda leaf: held[leaf.number] if isinstance(leaf, Slot) else leaf, (self.args, self.kwargs))
        with nullcontext() if self.autocast is None else torch.autocast(*self.autocast, cache_enabled=False):
            found = self.function(*args, **kwargs)
        return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, (Tensor, bool))]


@dataclass(frozen=True)
class Questions:
    """What a capture asked of its batch, and the answers that it got.

    leaves: slot -> place of its tensor in the batch. asked: slot -> answer. done: of each call, the slots that nothing reads after it.
    """

    leaves: dict[int, int]
    calls: tuple[Call, ...]
    done: tuple[tuple[int, ...], ...]
    asked: dict[int, bool]
    device_type: str

    def hold(self, tensors: list[Tensor]) -> bool:
        """Whether a batch of the same signature gives the same answers. tensors: those of the batch, in order; they are not changed."""
        held: dict[int, Any] = {slot: tensors[place] for slot, place in self.leaves.items()}
        try:
            with torch.inference_mode(), torch.autocast(self.device_type, enabled=False):
                for call, done in zip(self.calls, self.done):
                    for slot, result in zip(call.results, call.run(held)):
                        held[slot] = result
                        if slot in self.asked and bool(result) != self.asked[slot]:
                            return False
                    for slot in done:
                        held.pop(slot, None)
        except (IndexError, RuntimeError, ValueError):  # the model itself will fail on this batch, or take another way before it comes here
            return False
        return True


NO_QUESTIONS = Questions({}, (), (), {}, "cpu")


@dataclass(frozen=True)
class _Known:
    """A traced tensor whose value is known: by its slot, as long as nobody else has written to its memory (torch counts versions)."""

    tensor: Tensor
    version: int
    slot: int


class Questioner(TorchFunctionMode):
    """While active, follows what is computed from the batch's whole numbers, and answers yes-or-no questions about them.

    Draws are followed as far as their range decides: `torch.rand([]) < 0` is no, whatever is drawn (a layer drop of probability 0).
    """

    def __init__(self, traced: list[Tensor], real: list[Tensor], device: torch.device):
        """traced: the batch's tensors as the model sees them; real: the same with values (those on meta have none and are not followed)."""
        super().__init__()
        self.device = device
        self.known: dict[int, _Known] = {}  # by id; a tensor in here does not die, so that no other takes its id
        self.real: dict[int, Any] = {}
        self.leaves: dict[int, int] = {}
        self.calls: list[Call] = []
        self.asked: dict[int, bool] = {}
        self.wrote = False
        self.draws: dict[int, Tensor] = {}  # of one number from [0, 1)
        self.compared: dict[int, tuple[Tensor, bool | None]] = {}  # a draw with a number: surely yes, surely no, or either
        self.count = 0
        for place, (seen, given) in enumerate(zip(traced, real)):
            if not given.is_floating_point() and not given.is_complex() and given.device.type != "meta":
                with _disable_current_modes():
                    self.leaves[self._keep(seen, given.detach().clone(), self._new())] = place

    def questions(self) -> Questions:
        """Those asked so far, with the calls that they depend on; equal calls once, unless some call changes a tensor in place."""
        if not self.asked:
            return NO_QUESTIONS
        last = max(place for place, call in enumerate(self.calls) if set(call.results) & set(self.asked))
        calls, asked = self.calls[: last + 1], self.asked
        if not self.wrote:
            calls, asked = _without_repeats(calls, asked)
            needed, kept = set(asked), []
            for call in reversed(calls):
                if needed & set(call.results):
                    kept.append(call)
                    needed |= call.reads()
            calls = kept[::-1]
        last_use = {slot: place for place, call in enumerate(calls) for slot in (*call.results, *call.reads())}
        done = tuple(tuple(slot for slot, end in last_use.items() if end == place) for place in range(len(calls)))
        leaves = {slot: place for slot, place in self.leaves.items() if slot in last_use}
        return Questions(leaves, tuple(calls), done, asked, self.device.type)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in ABOUT:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func in _ASKING and tensors:
            answer = self._answer(func, args, kwargs, tensors)
            if answer is not None:
                return answer
        if torch._C._functorch.peek_interpreter_stack() is not None:  # other tensors; where they write, versions tell
            return func(*args, **kwargs)
        known = all(self._is_known(tensor) for tensor in tensors)
        result = func(*args, **kwargs)
        made = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        if func is torch.rand and not tensors and result.numel() == 1:
            self.draws[id(result)] = result
        elif len(tensors) == 1 and id(tensors[0]) in self.draws and tensors[0]._version == 0 and isinstance(result, Tensor):
            self._compare_draw(func, args, result)
        elif func not in _ASKING and not (known and func not in _DATA and self._follow(func, args, kwargs, tensors, made)):
            self._lose(func, tensors, made)
        return result

    def _answer(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> bool | None:
        if id(tensors[0]) in self.compared:
            answer = self.compared[id(tensors[0])][1]
            if answer is None:
                raise RuntimeError("data-dependent: a random draw decides what runs; is there a layer drop above 0 to set to 0?")
            return answer
        if func is Tensor.item and tensors[0].dtype is not torch.bool:
            if self._is_known(tensors[0]):
                raise RuntimeError(
                    "data-dependent: a number is taken out of the batch; a yes-or-no question may be asked of it, such as (n > 0).any()"
                )
            return None
        if not all(self._is_known(tensor) for tensor in tensors):
            return None
        call = self._call(func, args, kwargs, 1)
        with _disable_current_modes():
            answer = bool(call.run(self.real)[0])
        self.calls.append(call)
        self.asked[call.results[0]] = answer
        return answer

    def _follow(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], made: list[Tensor]) -> bool:
        """Computes a call on known tensors for real too. False if it could not be: its results are not known."""
        wrote = any(tensor._version != self.known[id(tensor)].version for tensor in tensors)
        if not made and not wrote:
            return True
        if any(tensor.numel() > MOST_ELEMENTS for tensor in made):
            return False
        call = self._call(func, args, kwargs, len(made))
        with _disable_current_modes():
            before = self._random()
            results = call.run(self.real)
            if any(not torch.equal(a, b) for a, b in zip(before, self._random())):  # a draw: another one at each step
                self._set_random(before)
                return False
        self.calls.append(call)
        if wrote:  # so did the call on real tensors: all that shares their memory is up to date
            self.wrote = True
            touched = {_memory(tensor) for tensor in tensors}
            for key, entry in self.known.items():
                if _memory(entry.tensor) in touched:
                    self.known[key] = replace(entry, version=entry.tensor._version)
        for slot, seen, real in zip(call.results, made, results):
            self._keep(seen, real, slot)
        return True

    def _lose(self, func: Any, tensors: list[Tensor], made: list[Tensor]) -> None:
        """A call that was not followed: its results are not known, nor what it may have written to, with all that shares that memory."""
        for tensor in made:
            self.known.pop(id(tensor), None)
        name = getattr(func, "__name__", "")
        if (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE or func in _DATA:
            touched = {_memory(tensor) for tensor in tensors if id(tensor) in self.known}
            self.known = {key: entry for key, entry in self.known.items() if _memory(entry.tensor) not in touched} if touched else self.known

    def _compare_draw(self, func: Any, args: Any, result: Tensor) -> None:
        """What the range [0, 1) of a draw says about a comparison with a number."""
        name = getattr(func, "__name__", "").strip("_")
        if name not in ("lt", "le", "gt", "ge") or len(args) != 2 or not isinstance(args[1], (int, float)):
            return
        bound = args[1]
        yes = {"lt": bound >= 1, "le": bound >= 1, "gt": bound < 0, "ge": bound <= 0}[name]
        no = {"lt": bound <= 0, "le": bound < 0, "gt": bound >= 1, "ge": bound >= 1}[name]
        self.compared[id(result)] = (result, True if yes else False if no else None)

    # -- what is known --------------------------------------------------------------------------------------------------------------

    def _is_known(self, tensor: Tensor) -> bool:
        entry = self.known.get(id(tensor))
        return entry is not None and not tensor.is_inference() and tensor._version == entry.version

    def _call(self, func: Any, args: Any, kwargs: Any, num_results: int) -> Call:
        slotted = pytree.tree_map(lambda leaf: Slot(self.known[id(leaf)].slot) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        kind = self.device.type
        autocast = (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        return Call(func, slotted[0], slotted[1], tuple(self._new() for _ in range(num_results)), autocast)

    def _new(self) -> int:
        self.count += 1
        return self.count

    def _keep(self, seen: Tensor, real: Any, slot: int) -> int:
        self.real[slot] = real
        if not seen.is_inference():
            self.known[id(seen)] = _Known(seen, seen._version, slot)
        return slot

    def _random(self) -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else [])]

    def _set_random(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self.device)


def _memory(tensor: Tensor) -> int:
    """Equal for tensors that share memory."""
    return tensor.untyped_storage()._cdata


def _without_repeats(calls: list[Call], asked: dict[int, bool]) -> tuple[list[Call], dict[int, bool]]:
    """Each distinct call once: every layer of a model may make the same mask."""
    same: dict[int, int] = {}
    first: dict[str, Call] = {}
    kept = []
    for call in calls:
        args, kwargs = pytree.tree_map(
            lambda leaf: Slot(same.get(leaf.number, leaf.number)) if isinstance(leaf, Slot) else leaf, (call.args, call.kwargs)
        )
        call = replace(call, args=args, kwargs=kwargs)
        earlier = first.setdefault(repr((call.function, args, kwargs, call.autocast)), call)
        if earlier is call:
            kept.append(call)
        same.update(zip(call.results, earlier.results))
    return kept, {same[slot]: answer for slot, answer in asked.items()}
