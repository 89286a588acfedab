"""Yes-or-no questions that a model asks about its batch: `if mask.all():`, `torch.equal(ids, other)`.

A plan must hold for every batch, so a model may not look at values; but what it asks of the batch's own whole numbers (masks, ids, lengths) can be
answered while it is captured, and asked again of each batch before a step. So a program holds for one set of answers, and a batch
that gives other answers gets a program of its own.

While a model is traced, what it computes from those tensors alone is computed for real as well, call by call, beside the trace. Numbers taken out of
a tensor (`.item()` of anything but a truth value) would make sizes depend on data and stay refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

# Larger results (a mask of every pair of tokens is smaller) are not followed: nobody asks yes or no of them.
MOST_ELEMENTS = 1 << 24

_IN_PLACE = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__".split()
)
_ASKING = (
    Tensor.__bool__,
    Tensor.item,
    Tensor.__contains__,
    torch.equal,
    torch.allclose,
    torch.is_nonzero,
    Tensor.equal,
    Tensor.allclose,
    Tensor.is_nonzero,
)


@dataclass(frozen=True)
class Slot:
    """A tensor or a truth value of the recorded calls, by number."""

    number: int


@dataclass(frozen=True)
class Call:
    """results = function(*args, **kwargs); the tensors in args are Slots. results: slot numbers of its tensors, in order."""

    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    results: tuple[int, ...]


@dataclass(frozen=True)
class Questions:
    """What a capture asked of its batch, and the answers that it got. leaves: slot -> place of its tensor in the batch. asked: slot -> answer."""

    leaves: dict[int, int]
    calls: tuple[Call, ...]
    asked: dict[int, bool]

    def hold(self, tensors: list[Tensor]) -> bool:
        """Whether a batch of the same signature gives the same answers. tensors: those of the batch, in order; they are not changed."""
        held: dict[int, Any] = {slot: tensors[place].clone() for slot, place in self.leaves.items()}
        with torch.inference_mode():
            for call in self.calls:
                for slot, result in zip(call.results, _run(call, held)):
                    held[slot] = result
                    if slot in self.asked and bool(result) != self.asked[slot]:
                        return False
        return True


NO_QUESTIONS = Questions({}, (), {})


class Questioner(TorchFunctionMode):
    """While active, follows what is computed from the batch's whole numbers, and answers yes-or-no questions about them.

    Draws are followed as far as their range decides: `torch.rand([]) < 0` is no, whatever is drawn (a layer drop of probability 0).
    """

    def __init__(self, traced: list[Tensor], real: list[Tensor]):
        """traced: the batch's tensors as the model sees them; real: the same with values (those on meta have none and are not followed)."""
        super().__init__()
        self.slots: dict[int, int] = {}  # id of a traced tensor -> slot
        self.alive: list[Any] = []  # what has an id in `slots` must not die, or another tensor could take its id
        self.real: dict[int, Any] = {}
        self.leaves: dict[int, int] = {}
        self.calls: list[Call] = []
        self.asked: dict[int, bool] = {}
        self.drawn: dict[int, Tensor] = {}  # uniform draws from [0, 1)
        self.certain: dict[int, bool] = {}
        self.open: dict[int, Tensor] = {}  # comparisons of draws that may go either way
        self.count = 0
        for place, (seen, given) in enumerate(zip(traced, real)):
            if not given.is_floating_point() and not given.is_complex() and given.device.type != "meta":
                with _disable_current_modes():
                    self.leaves[self._keep(seen, given.detach().clone())] = place

    def questions(self) -> Questions:
        """Those asked so far, with the calls that they depend on."""
        if not self.asked:
            return NO_QUESTIONS
        if any(_changes(call.function) for call in self.calls):
            return Questions(self.leaves, tuple(self.calls), self.asked)
        needed, kept = set(self.asked), []
        for call in reversed(self.calls):
            if needed & set(call.results):
                kept.append(call)
                needed.update(slot.number for slot in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(slot, Slot))
        return Questions({slot: place for slot, place in self.leaves.items() if slot in needed}, tuple(reversed(kept)), self.asked)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func in _ASKING and tensors:
            if id(tensors[0]) in self.open:
                raise RuntimeError("data-dependent: a random draw decides what runs; is there a layer drop above 0 to set to 0?")
            answer = self._answer(func, args, kwargs, tensors)
            if answer is not None:
                return answer
        result = func(*args, **kwargs)
        if func is torch.rand:
            self.drawn[id(result)] = result
        elif len(tensors) == 1 and id(tensors[0]) in self.drawn and isinstance(result, Tensor):
            self._compare_draw(func, args, result)
        elif torch._C._functorch.peek_interpreter_stack() is None and func not in _ASKING:
            self._follow(func, args, kwargs, tensors, result)
        return result

    def _answer(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> bool | None:
        if len(tensors) == 1 and id(tensors[0]) in self.certain:
            return self.certain[id(tensors[0])]
        if not all(id(tensor) in self.slots for tensor in tensors) or (func is Tensor.item and tensors[0].dtype is not torch.bool):
            return None
        call = self._call(func, args, kwargs, 1)
        with _disable_current_modes():
            answer = bool(_run(call, self.real)[0])
        self.calls.append(call)
        self.asked[call.results[0]] = answer
        return answer

    def _follow(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], result: Any) -> None:
        """Computes the call for real too, if everything that it reads is known."""
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if not all(id(tensor) in self.slots for tensor in tensors):
            if _changes(func) and tensors:
                self._forget(tensors[0])
            return
        if not (made or _changes(func)) or any(leaf.numel() > MOST_ELEMENTS for leaf in made):
            return
        call = self._call(func, args, kwargs, len(made))
        with _disable_current_modes():
            before = torch.get_rng_state()
            results = _run(call, self.real)
            if not torch.equal(before, torch.get_rng_state()):  # a draw: another one at each step
                torch.set_rng_state(before)
                return
        self.calls.append(call)
        for slot, seen, real in zip(call.results, made, results):
            self._keep(seen, real, slot)

    def _compare_draw(self, func: Any, args: Any, result: Tensor) -> None:
        """What the range [0, 1) of a draw says about a comparison with a number."""
        if len(args) != 2 or isinstance(args[1], Tensor) or not isinstance(args[1], (int, float)):
            return
        # (comparison, surely no, surely yes) as conditions on the number
        bound, name = args[1], getattr(func, "__name__", "").strip("_")
        known = {"lt": (bound <= 0, bound >= 1), "le": (bound < 0, bound >= 1), "gt": (bound >= 1, bound < 0), "ge": (bound >= 1, bound <= 0)}
        if name not in known:
            return
        no, yes = known[name]
        if no or yes:
            self.certain[id(result)] = yes
            self.alive.append(result)
        else:
            self.open[id(result)] = result

    # -- slots ----------------------------------------------------------------------------------------------------------------------

    def _call(self, func: Any, args: Any, kwargs: Any, num_results: int) -> Call:
        slotted = pytree.tree_map(lambda leaf: Slot(self.slots[id(leaf)]) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        return Call(func, slotted[0], slotted[1], tuple(self._new() for _ in range(num_results)))

    def _new(self) -> int:
        self.count += 1
        return self.count

    def _keep(self, seen: Tensor, real: Any, slot: int | None = None) -> int:
        slot = self._new() if slot is None else slot
        self.slots[id(seen)], self.real[slot] = slot, real
        self.alive.append(seen)
        return slot

    def _forget(self, changed: Tensor) -> None:
        """A known tensor was changed by something unknown: neither it nor what shares its memory is known any more."""
        slot = self.slots.get(id(changed))
        if slot is None:
            return
        memory = self.real[slot].untyped_storage().data_ptr()
        self.slots = {key: s for key, s in self.slots.items() if self.real[s].untyped_storage().data_ptr() != memory}


def _run(call: Call, held: dict[int, Any]) -> list[Any]:
    """The results of a recorded call, tensors and truth values alone."""
    args, kwargs = pytree.tree_map(lambda leaf: held[leaf.number] if isinstance(leaf, Slot) else leaf, (call.args, call.kwargs))
    return [leaf for leaf in pytree.tree_leaves(call.function(*args, **kwargs)) if isinstance(leaf, (Tensor, bool))]


def _changes(func: Callable[..., Any]) -> bool:
    """Whether a torch function writes into its first argument: `masked_fill_`, `x[i] = y`, `x += y`."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
