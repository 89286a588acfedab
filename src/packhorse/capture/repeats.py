"""What of a step may repeat: runs of equal blocks in a model, time steps in a batch; and the same step with fewer of them.

These are guesses, made by looks alone: whether a step follows them is found out by capture/stamp.py.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from packhorse.capture.batch import replace_tensors, tensors_of


@dataclass(frozen=True)
class Run:
    """`count` repetitions of `period` children, the same in each of `places`: (a ModuleList or Sequential, number of its first repeating child)."""

    places: tuple[tuple[nn.Module, int], ...]
    count: int
    period: int


def runs_of_blocks(model: nn.Module, least: int) -> list[Run]:
    """The runs of at least `least` children that look alike, the outermost ones only. Lists whose runs lie alike are taken for one: they may be used
    together."""
    found: dict[tuple[int, int, int], list[nn.Module]] = {}
    inside: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or any(path.startswith(f"{outer}.") for outer in inside):
            continue
        looks = [_look(child) for child in module.children()]
        for start, count, period in _runs(looks, least):
            found.setdefault((start, count, period), []).append(module)
            inside.append(path)
    return [Run(tuple((module, start) for module in modules), count, period) for (start, count, period), modules in found.items()]


def _runs(looks: list, least: int) -> Iterator[tuple[int, int, int]]:
    """(first, repetitions, period) of what repeats in a sequence."""
    index = 0
    while index < len(looks):
        for period in (1, 2):
            end = index + period
            while end < len(looks) and looks[end] == looks[end - period]:
                end += 1
            count = (end - index) // period
            if count >= least:
                yield index, count, period
                index += count * period
                break
        else:
            index += 1


def _look(module: nn.Module) -> tuple:
    """Equal for modules of the same classes with tensors of the same kind."""
    kinds = tuple(type(part) for part in module.modules())
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return kinds, tuple((name, t.shape, t.stride(), t.dtype, t.requires_grad) for name, t in tensors)


@contextmanager
def shortened(runs: Sequence[Run], counts: Sequence[int]) -> Iterator[None]:
    """The model with the first `counts[r]` repetitions of each run alone. Children keep their names."""
    kept = {id(module): (module, dict(module._modules)) for run in runs for module, _ in run.places}
    try:
        for run, count in zip(runs, counts):
            for module, start in run.places:
                names = list(kept[id(module)][1])
                for name in names[start + count * run.period : start + run.count * run.period]:
                    del module._modules[name]
        yield
    finally:
        for module, children in kept.values():
            module._modules.clear()
            module._modules.update(children)


def lengths(batch: Any, least: int) -> list[tuple[int, int]]:
    """(dim, size) of what may be time: sizes of at least `least` of the first two dims of the batch's tensors, the longest first."""
    found = {(dim, size) for tensor in tensors_of(batch) for dim, size in enumerate(tensor.shape[:2]) if size >= least}
    return sorted(found, key=lambda place: (-place[1], place[0]))


def cut(batch: Any, dim: int, size: int, length: int) -> Any:
    """The batch with the first `length` of `size` along `dim` alone, in all tensors that have this size there; they are laid out anew, row by row."""
    tensors = [
        tensor.narrow(dim, 0, length).contiguous() if tensor.dim() > dim and tensor.shape[dim] == size else tensor for tensor in tensors_of(batch)
    ]
    return replace_tensors(batch, tensors)


def is_row_major(batch: Any) -> bool:
    """Whether `cut` lays tensors out as they are."""
    return all(tensor.is_contiguous() for tensor in tensors_of(batch))
