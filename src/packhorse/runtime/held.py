"""What a rank holds of the state of a step, by names that are the same on every mesh and at every stage of ZeRO.

A tensor is known by its name and its elements by their number in the order of memory, of the tensor or of the part that this tensor parallel rank has
of it; where they lie in runs and shards is not told. A checkpoint is made of these.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from packhorse.capture.dtypes import LONG
from packhorse.capture.flat_storage import WORDS
from packhorse.mesh import Mesh
from packhorse.parallel.part import Part
from packhorse.planning.persistent import Persistent, Run, holds_models_own
from packhorse.runtime.parts import is_kept, without_padding
from packhorse.runtime.storage import view, views
from packhorse.runtime.transport import memory_order


@dataclass(frozen=True)
class Piece:
    """The elements [begin, begin + n) of a tensor, in the order of memory, which this rank holds.

    held: (n,), the live ones. shape, strides: of the whole tensor. saved: (first, end) of those that this rank saves; other ranks save the others.
    part: the part of the tensor that they are elements of; begin and saved count its padding.
    """

    held: Tensor
    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    saved: tuple[int, int]
    part: Part | None = None

    @property
    def span(self) -> tuple[int, int]:
        """(first, end) of the elements held, without padding."""
        return self.without_padding(self.begin, self.begin + self.held.numel())

    def without_padding(self, first: int, end: int) -> tuple[int, int]:
        """The same elements where padding does not count."""
        return (first, end) if self.part is None else (self.part.before(first), self.part.before(end))

    def to_save(self) -> Tensor:
        """The elements that this rank saves, without padding: (n,), the live ones where they lie in one piece."""
        first, end = self.saved
        held = self.held[first - self.begin : end - self.begin]
        kept = without_padding(held, first, self.part)
        if kept is None:
            assert self.part is not None
            return held[is_kept(first, end, self.part, held.device)]
        return kept

    def take(self, values: Tensor) -> None:
        """Other values for the elements of `span`: (n,). Padding stays."""
        kept = without_padding(self.held, self.begin, self.part)
        if kept is None:
            assert self.part is not None
            self.held[is_kept(self.begin, self.begin + self.held.numel(), self.part, self.held.device)] = values.to(self.held.device)
        else:
            kept.copy_(values)


def pieces(persistent: Persistent, runs: dict[str, Tensor], units: dict[str, str], mesh: Mesh, rank: int) -> dict[str, Piece]:
    """Name -> what is held of it: the model's own parameters, master weights beside them, buffers, optimizer states. Each element of each is saved by
    one rank of the mesh. units: parameter -> its unit, which the names of runs end in."""
    found: dict[str, Piece] = {}
    for run in persistent.runs:
        if run.kind == "optimizer states" and not run.is_numbers:
            name = _known_as(run, units[run.layout.slots[0].target.removeprefix(f"{run.name}/")])
            found |= {f"state/{name}/{target.removeprefix(run.name)[1:]}": piece for target, piece in _pieces(run, runs[run.name], mesh, rank)}
        elif run.kind == "buffers":
            found |= {f"buffer/{target}": piece for target, piece in _pieces(run, runs[run.name], mesh, rank)}
        elif run.kind in ("parameters", "master weights"):
            word = "param" if holds_models_own(run) else "master" if run.kind == "master weights" else None
            found |= {f"{word}/{target}": piece for target, piece in _pieces(run, runs[run.name], mesh, rank) if word}
    return found


def numbers(persistent: Persistent, runs: dict[str, Tensor], units: dict[str, str]) -> dict[str, list[Tensor]]:
    """Name -> the numbers that an optimizer keeps of the parameters of a group, such as step counts, in the order of the model. Each a () view."""
    places = {name: place for place, name in enumerate(units)}
    homes = views(persistent, runs, "state")
    found: dict[str, list[tuple[int, Tensor]]] = {}
    parameters = {run.name.removeprefix("param."): run for run in persistent.runs if run.kind == "parameters"}
    for run in persistent.runs:
        if run.is_numbers:
            of = parameters[run.name.partition(".")[2]]
            ours = found.setdefault(f"state/{_known_as(run, units[of.layout.slots[0].target])}", [])
            ours += [(places[slot.target], homes[run.name][index]) for index, slot in enumerate(of.layout.slots)]
    return {name: [number for _, number in sorted(ours, key=lambda pair: pair[0])] for name, ours in found.items()}


def stacked(held: list[Tensor], rank: int) -> Piece:
    """Numbers as one tensor (n,), a copy, which rank 0 saves."""
    count = len(held)
    return Piece(torch.stack(held), 0, (count,), (1,), (0, 0 if rank else count))


def _pieces(run: Run, storage: Tensor, mesh: Mesh, rank: int) -> Iterator[tuple[str, Piece]]:
    """(target, what is held of it) of every tensor of the whole run, also of those of which nothing lies here. What all tp ranks have is saved by the
    first of them, and what all dp ranks have by the first of those."""
    itemsize = LONG[run.dtype].itemsize
    low = run.rank * run.shard_bytes
    slots = {slot.target: slot for slot in run.slots}
    for whole in run.layout.slots:
        slot, count = slots.get(whole.target), whole.value.num_elements
        held = memory_order(view(storage, slot)) if slot else torch.empty(0, dtype=LONG[run.dtype], device=storage.device)
        if run.num_ranks > 1:
            first, end = (min(max((edge - whole.offset) // itemsize, 0), count) for edge in (low, low + run.shard_bytes))
        else:
            first, end = 0, 0 if mesh.dp_rank(rank) else count
        part, begin = whole.part, slot.begin if slot else 0
        if part is None:
            saved = (0, 0) if mesh.tp_rank(rank) else (first, end)
            yield whole.target, Piece(held, begin, whole.value.shape, whole.value.strides, saved)
        else:
            yield whole.target, Piece(held, begin, part.shape, part.strides, (first, end), part)


def _known_as(run: Run, unit: str) -> str:
    """The name of the run on one rank."""
    name = run.name.removesuffix(f".{unit}")
    return next((name.removesuffix(f".{word}") for word in WORDS if name.endswith(f".{word}")), name)
