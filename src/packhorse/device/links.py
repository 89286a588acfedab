"""What moving bytes takes: links, and which neighbouring ranks each of them joins. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A way for bytes. fixed_s: seconds of a message before its first byte arrives; bytes_per_s: of one rank, in one direction."""

    fixed_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: int, messages: int = 1) -> float:
        """Seconds until so many bytes, in so many messages one after another, have arrived: messages * fixed_s + num_bytes / bytes_per_s."""
        return messages * self.fixed_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Level:
    """A level of a machine or cluster: every `ranks` neighbouring ranks, counted from a multiple of `ranks`, are joined by `link`.

    Its rate is what a rank has while all ranks use it at once.
    """

    name: str
    ranks: int
    link: Link
