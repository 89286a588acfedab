"""A model whose values are made later, one tensor after another: no rank ever holds the whole of it.

`model = packhorse.deferred(lambda: GPT(...))` builds it without memory and writes down every call that would have made or changed a tensor.
`packhorse.compile` runs the calls again on real memory, in the same order and from the same random state, so that the values are bit for bit those
of an ordinary construction; each tensor is handed out after the last call that touches it and freed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from packhorse.errors import UserError

# Calls that replace all that a tensor holds: what stood there before is needed by nobody.
_OVERWRITE = {"aten::normal_", "aten::uniform_", "aten::zero_", "aten::fill_", "aten::copy_", "aten::bernoulli_", "aten::exponential_"}


@dataclass(frozen=True)
class _Call:
    """function(*args, **kwargs) -> results. Tensors are stand-ins without memory. state: of torch's default generator, where it was seeded since the
    call before."""

    function: Any
    args: tuple
    kwargs: dict[str, Any]
    results: tuple
    state: Tensor | None = None


@dataclass
class Recipe:
    """How the tensors of a model are made. state: of torch's default generator when it began. tensors: name -> stand-in."""

    state: Tensor
    calls: list[_Call] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)


class NeedsValues(UserError):
    """The construction of a model looks at values of its tensors, so that they cannot be made later."""


class _Recorder(TorchDispatchMode):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe, self.state = recipe, recipe.state

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        seeded = None
        if torch.Tag.nondeterministic_seeded in function.tags:
            with _disable_current_modes():
                now = torch.get_rng_state()
                if not torch.equal(now, self.state):
                    seeded = self.state = now
        results = function(*args, **(kwargs or {}))
        made = tuple(leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor))
        self.recipe.calls.append(_Call(function, args, kwargs or {}, made, seeded))
        return results


def deferred(make: Callable[[], nn.Module]) -> nn.Module:
    """The model that make() would build, on the meta device; packhorse.compile gives it its values. Draws nothing and takes no memory.

    Raises NeedsValues if the construction asks for values of its tensors.
    """
    recipe = Recipe(torch.get_rng_state())
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _Recorder(recipe):
            model = make()
    except (RuntimeError, TypeError) as error:
        if type(error).__name__ not in ("DataDependentOutputException", "DynamicOutputShapeException"):
            raise
        raise NeedsValues(
            f"packhorse.deferred: the construction of this model asks for values of its tensors ({error}), which are made "
            "later; build it as usual, on a device that holds it"
        ) from error
    empty: dict[int, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=True):
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is None:
                    continue
                if id(tensor) not in empty:
                    empty[id(tensor)] = _on_meta(tensor)
                    full = f"{prefix}.{name}" if prefix else name
                    empty[id(tensor)]._packhorse_recipe = (recipe, full)  # type: ignore[attr-defined]
                    recipe.tensors[full] = tensor
                kind[name] = empty[id(tensor)]  # type: ignore[assignment]
    return model


def _on_meta(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def recipe_of(tensors: dict[str, Tensor]) -> tuple[Recipe | None, dict[str, str]]:
    """What the tensors of a model are made by, and name -> the name that a tensor has there; None for a model that has its values.

    Raises UserError if some are on the meta device and were not made by `deferred`.
    """
    on_meta = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "meta"}
    if not on_meta:
        return None, {}
    found = {name: getattr(tensor, "_packhorse_recipe", None) for name, tensor in on_meta.items()}
    first = next(iter(found.values()))
    unknown = next((name for name, known in found.items() if known is None or first is None or known[0] is not first[0]), None)
    if unknown is not None or len(on_meta) != len(tensors):
        raise UserError(
            f"the model has {len(on_meta)} tensors on the meta device (such as {unknown or next(iter(on_meta))!r}), which have no values to train; "
            "planning works so, but before packhorse.compile give them values: build the whole model by "
            "packhorse.deferred(lambda: ...), or on a real "
            "device, or call model.to_empty(device='cpu') and initialise or load weights"
        )
    assert first is not None
    return first[0], {name: known[1] for name, known in found.items() if known}


def order_of(recipe: Recipe) -> list[str]:
    """Names in the order in which `made` hands them out."""
    return [name for _, name in sorted((last, name) for name, last in _last_calls(recipe).items())]


def made(recipe: Recipe, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """(name, values) of every tensor, each as soon as no later call touches it. Leaves torch's generator as it is."""
    lasts = _last_calls(recipe)
    due: dict[int, list[str]] = {}
    for name, last in lasts.items():
        due.setdefault(last, []).append(name)
    versions = _Versions(recipe)
    held: dict[int, Tensor] = {}  # storage of a stand-in -> a tensor on the real storage
    before, state = torch.get_rng_state(), recipe.state
    try:
        for index, call in enumerate(recipe.calls):
            torch.set_rng_state(state if call.state is None else call.state)
            _run(call, held, device, fresh=versions.begins(index))
            state = torch.get_rng_state()
            torch.set_rng_state(before)
            for name in sorted(due.get(index, ())):
                yield name, _real(recipe.tensors[name], held)
            for key in versions.ended(index):
                held.pop(key, None)
    finally:
        torch.set_rng_state(before)


class _Versions:
    """When the memory of each storage is needed: from an overwriting call to the last one before the next."""

    def __init__(self, recipe: Recipe):
        self.starts: set[tuple[int, int]] = set()
        touched: dict[int, int] = {}
        ends: dict[int, list[int]] = {}
        for index, call in enumerate(recipe.calls):
            overwritten = _overwritten(call)
            if overwritten is not None and overwritten in touched:
                ends.setdefault(touched[overwritten], []).append(overwritten)
                self.starts.add((index, overwritten))
            for tensor in (*_given(call), *call.results):
                touched[_key(tensor)] = index
        for key, index in touched.items():
            ends.setdefault(index, []).append(key)
        self.ends = ends

    def begins(self, index: int) -> Callable[[int], bool]:
        return lambda key: (index, key) in self.starts

    def ended(self, index: int) -> list[int]:
        return self.ends.get(index, [])


def _run(call: _Call, held: dict[int, Tensor], device: torch.device, fresh: Callable[[int], bool]) -> None:
    """One call on real memory."""

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if not isinstance(leaf, FakeTensor):
                return leaf
            if fresh(_key(leaf)):
                held.pop(_key(leaf), None)
            return _real(leaf, held, device)
        return device if isinstance(leaf, torch.device) and leaf.type != "meta" else leaf

    with torch.no_grad():
        found = tree_map(real, (call.args, call.kwargs))
        results = tuple(leaf for leaf in tree_leaves(call.function(*found[0], **found[1])) if isinstance(leaf, Tensor))
    for wanted, result in zip(call.results, results, strict=True):
        if _key(wanted) not in held:
            held[_key(wanted)] = result.detach()


def _real(tensor: Tensor, held: dict[int, Tensor], device: torch.device | None = None) -> Tensor:
    """The real tensor that a stand-in stands for."""
    key = _key(tensor)
    if key not in held:
        assert device is not None, "a tensor is asked for before anything has made it"
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        held[key] = torch.empty(size, dtype=tensor.dtype, device=device)
    whole = held[key]
    return torch.empty(0, dtype=tensor.dtype, device=whole.device).set_(
        whole.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _given(call: _Call) -> list[Tensor]:
    return [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, FakeTensor)]


def _overwritten(call: _Call) -> int | None:
    """The storage whose whole contents the call replaces."""
    if call.function._schema.name not in _OVERWRITE:
        return None
    target = call.args[0]
    whole = target.numel() * target.element_size() == target.untyped_storage().nbytes()
    reads = any(_key(tensor) == _key(target) for tensor in _given(_Call(None, call.args[1:], call.kwargs, ())))
    return _key(target) if whole and not reads else None


def _last_calls(recipe: Recipe) -> dict[str, int]:
    touched: dict[int, int] = {}
    for index, call in enumerate(recipe.calls):
        for tensor in (*_given(call), *call.results):
            touched[_key(tensor)] = index
    return {name: touched[_key(tensor)] for name, tensor in recipe.tensors.items()}
