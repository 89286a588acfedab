"""The mesh: how many ranks along each axis, and where one rank stands in it. No torch."""

from dataclasses import dataclass

from packhorse.errors import UserError

AXES = ("world", "dp", "tp")  # "world" is all ranks


@dataclass(frozen=True)
class Mesh:
    """Degrees of the two axes: `dp` (data parallel) and `tp` (tensor parallel). tp ranks are neighbours: rank = dp_rank * tp + tp_rank.

    Raises UserError for a degree below 1.
    """

    dp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, degree in (("dp", self.dp), ("tp", self.tp)):
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise UserError(f"Mesh({axis}={degree!r}): the degree of an axis is a whole number of ranks, 1 or more")

    @property
    def world_size(self) -> int:
        return self.dp * self.tp

    def dp_rank(self, rank: int) -> int:
        """Where a rank stands on the axis `dp`."""
        return rank // self.tp

    def tp_rank(self, rank: int) -> int:
        """Where a rank stands on the axis `tp`."""
        return rank % self.tp

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """The ranks of the world that stand together along an axis of AXES, each group in the order of the axis; together they are all ranks."""
        everyone = range(self.world_size)
        if axis == "dp":
            return [tuple(everyone[tp_rank :: self.tp]) for tp_rank in range(self.tp)]
        step = {"tp": self.tp, "world": self.world_size}[axis]
        return [tuple(everyone[first : first + step]) for first in everyone[::step]]
