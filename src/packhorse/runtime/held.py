"""What a rank holds of the state of a step, by names that are the same at every number of ranks and every stage of ZeRO.

A tensor is known by its name and its elements by their number in the order of memory; where they lie in runs and shards is not told. A checkpoint
is made of these.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from packhorse.capture.dtypes import LONG
from packhorse.planning.persistent import Persistent, Run, holds_models_own
from packhorse.runtime.storage import view, views
from packhorse.runtime.transport import memory_order


@dataclass(frozen=True)
class Piece:
    """The elements [begin, begin + n) of a tensor, in the order of memory, which this rank holds.

    held: (n,), the live ones. shape, strides: of the whole tensor. saved: (first, end) of those that this rank saves; other ranks save the others.
    """

    held: Tensor
    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    saved: tuple[int, int]


def pieces(persistent: Persistent, runs: dict[str, Tensor], units: dict[str, str], rank: int) -> dict[str, Piece]:
    """Name -> what is held of it: the model's own parameters, master weights beside them, buffers, optimizer states. Each element of each is saved by
    one rank. units: parameter -> its unit, which the names of runs end in."""
    found: dict[str, Piece] = {}
    for run in persistent.runs:
        if run.kind == "optimizer states" and run.num_ranks > 1:
            name = _without_unit(run, units)
            found |= {f"state/{name}/{target.removeprefix(run.name)[1:]}": piece for target, piece in _pieces(run, runs[run.name], rank)}
        elif run.kind == "buffers":
            found |= {f"buffer/{target}": piece for target, piece in _pieces(run, runs[run.name], rank)}
        elif run.kind in ("parameters", "master weights"):
            word = "param" if holds_models_own(run) else "master" if run.kind == "master weights" else None
            found |= {f"{word}/{target}": piece for target, piece in _pieces(run, runs[run.name], rank) if word}
    return found


def numbers(persistent: Persistent, runs: dict[str, Tensor], units: dict[str, str]) -> dict[str, list[Tensor]]:
    """Name -> the numbers that an optimizer keeps of the parameters of a group, such as step counts, in the order of the model. Each a () view."""
    places = {name: place for place, name in enumerate(units)}
    homes = views(persistent, runs, "state")
    found: dict[str, list[tuple[int, Tensor]]] = {}
    parameters = {run.name.removeprefix("param."): run for run in persistent.runs if run.kind == "parameters"}
    for run in persistent.runs:
        if run.kind == "optimizer states" and run.num_ranks == 1:
            of = parameters[run.name.partition(".")[2]]
            ours = found.setdefault(f"state/{run.name.removesuffix(_unit_suffix(of, units))}", [])
            ours += [(places[slot.target], homes[run.name][index]) for index, slot in enumerate(of.layout.slots)]
    return {name: [number for _, number in sorted(ours, key=lambda pair: pair[0])] for name, ours in found.items()}


def stacked(held: list[Tensor], rank: int) -> Piece:
    """Numbers as one tensor (n,), a copy, which rank 0 saves."""
    count = len(held)
    return Piece(torch.stack(held), 0, (count,), (1,), (0, 0 if rank else count))


def _pieces(run: Run, storage: Tensor, rank: int) -> Iterator[tuple[str, Piece]]:
    """(target, what is held of it) of every tensor of the whole run, also of those of which nothing lies here."""
    itemsize = LONG[run.dtype].itemsize
    low = run.rank * run.shard_bytes
    slots = {slot.target: slot for slot in run.slots}
    for whole in run.layout.slots:
        slot, count = slots.get(whole.target), whole.value.num_elements
        held = memory_order(view(storage, slot)) if slot else torch.empty(0, dtype=LONG[run.dtype], device=storage.device)
        if run.num_ranks > 1:
            first, end = (min(max((edge - whole.offset) // itemsize, 0), count) for edge in (low, low + run.shard_bytes))
        else:
            first, end = 0, 0 if rank else count
        yield whole.target, Piece(held, slot.begin if slot else 0, whole.value.shape, whole.value.strides, (first, end))


def _without_unit(run: Run, units: dict[str, str]) -> str:
    unit = units[run.layout.slots[0].target.removeprefix(f"{run.name}/")]
    return run.name.removesuffix(f".{unit}")


def _unit_suffix(parameters: Run, units: dict[str, str]) -> str:
    return f".{units[parameters.layout.slots[0].target]}"
