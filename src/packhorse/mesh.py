"""The mesh: how many ranks along each axis, and where one rank stands in it. No torch."""

from dataclasses import dataclass

from packhorse.errors import UserError


@dataclass(frozen=True)
class Mesh:
    """Degrees of the two axes: `dp` (data parallel) and `tp` (tensor parallel; tp ranks are neighbours: tp_rank = rank % tp).

    Raises UserError for a degree below 1, and for tp above 1, which this version does not have.
    """

    dp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, degree in (("dp", self.dp), ("tp", self.tp)):
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise UserError(f"Mesh({axis}={degree!r}): the degree of an axis is a whole number of ranks, 1 or more")
        if self.tp > 1:
            raise UserError(
                f"Mesh(tp={self.tp}): this version of packhorse has no tensor parallelism; use tp=1 and the other ranks as dp. "
                "It is the next part of the road map (docs/design.md)."
            )

    @property
    def world_size(self) -> int:
        return self.dp * self.tp

    def dp_rank(self, rank: int) -> int:
        """Where a rank stands on the axis `dp`."""
        return rank // self.tp
