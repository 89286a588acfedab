"""How tensors lie over the ranks of the axis `tp` (Shoeybi et al. 2019, section 3). No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Split:
    """One dim of a tensor, cut over the tp ranks.

    blocks: what the dim is made of, one after another, in elements (query, key and value in a fused projection; one for each sequence where batch and
    sequence are one dim). Each block is cut into equal parts, one a rank; a rank's tensor is its parts, one after another. padding: so many of the
    last elements of the last block are not in the tensor (a vocabulary that the degree does not divide).
    """

    dim: int
    blocks: tuple[int, ...]
    padding: int = 0

    @property
    def size(self) -> int:
        """Of the dim, padding included."""
        return sum(self.blocks)

    def parts(self, rank: int, degree: int) -> list[tuple[int, int]]:
        """[start, end) of what the rank has of the dim, padding included."""
        found, at = [], 0
        for block in self.blocks:
            part = block // degree
            found.append((at + rank * part, at + (rank + 1) * part))
            at += block
        return found

    def held(self, rank: int, degree: int) -> list[tuple[int, int]]:
        """The same without padding: elements of the tensor as the model has it. A rank that has nothing but padding has an empty part."""
        end = self.size - self.padding
        return [(min(first, end), min(last, end)) for first, last in self.parts(rank, degree)]

    def local(self, shape: tuple[int, ...], degree: int) -> tuple[int, ...]:
        """The shape of a rank's tensor, of the shape of the whole one (with or without padding)."""
        return (*shape[: self.dim], self.size // degree, *shape[self.dim + 1 :])


@dataclass(frozen=True)
class Sharding:
    """A model over `degree` tp ranks, seen by the `rank`-th: parameter name -> how it is cut; a parameter without an entry is whole on every rank.

    sequence: what lies between the split layers (norms, dropout, residual sums) is cut along the sequence (sequence parallelism).
    """

    degree: int
    rank: int
    splits: Mapping[str, Split] = field(default_factory=lambda: MappingProxyType({}))
    sequence: bool = False
