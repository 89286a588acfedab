"""A buffer (when it is alive, how large it is) and a layout (at which byte each buffer lies). No torch."""

from dataclasses import dataclass

from packhorse.errors import UserError


@dataclass(frozen=True, slots=True)
class Buffer:
    """`size` bytes that are alive at the times t of the schedule with lower <= t < upper (half-open).

    A size of zero is allowed: such a buffer has a lifespan but takes no room.
    Raises UserError for an empty lifespan and for a negative size.
    """

    name: str
    lower: int
    upper: int
    size: int

    def __post_init__(self) -> None:
        if self.lower >= self.upper:
            raise UserError(
                f"buffer {self.name!r}: its lifespan [{self.lower}, {self.upper}) is empty; "
                "expected lower < upper (upper is the first time at which it is no longer alive)"
            )
        if self.size < 0:
            raise UserError(f"buffer {self.name!r}: its size is {self.size} bytes; expected 0 or more")

    def overlaps(self, other: "Buffer") -> bool:
        """Whether the two are alive at one and the same time."""
        return self.lower < other.upper and other.lower < self.upper


@dataclass(frozen=True)
class Layout:
    """One fixed offset in one arena for every buffer.

    offsets      name -> first byte, a multiple of `alignment`
    height       bytes of the arena: the largest offset + size, sizes rounded up to `alignment`
    lower_bound  bytes that no layout can go below: the most that is alive at one time, sizes rounded up likewise
    method       what produced it, for people: "first_fit/size", "solver", ...
    """

    offsets: dict[str, int]
    height: int
    lower_bound: int
    alignment: int
    method: str

    @property
    def fragmentation(self) -> int:
        """Bytes of the arena that the lower bound cannot account for."""
        return self.height - self.lower_bound
