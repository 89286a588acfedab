"""The mesh: how many ranks along each axis, and where one rank stands in it. No torch."""

from dataclasses import dataclass

from packhorse.errors import UserError


@dataclass(frozen=True)
class Mesh:
    """Degrees of the two axes: `dp` (data parallel) and `tp` (tensor parallel; tp ranks are neighbours: tp_rank = rank % tp).

    Raises UserError for a degree below 1, and for degrees above 1: this version plans and runs one rank.
    """

    dp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, degree in (("dp", self.dp), ("tp", self.tp)):
            if not isinstance(degree, int) or degree < 1:
                raise UserError(f"Mesh({axis}={degree!r}): the degree of an axis is a whole number of ranks, 1 or more")
            if degree > 1:
                raise UserError(
                    f"Mesh({axis}={degree}): this version of packhorse plans and runs one rank only; use Mesh(dp=1, tp=1). "
                    "Data parallel and tensor parallel meshes are the next parts of the road map (docs/design.md)."
                )
