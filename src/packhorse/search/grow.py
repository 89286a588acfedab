"""What a deep model needs, from plans of the same model with few blocks, on few samples. No torch.

With alike blocks every figure of a plan is an affine function of their number, once there are a few of them, and of the number of samples: what a
block makes, sends and computes is the same for each. So two depths and two batch sizes tell all others: f(d, b) = f + f_d d + f_b b + f_db d b. Only
a peak can change its instant on the way, to one that grows faster. Nothing grows faster with depth than what all blocks save for the backward pass,
so where the peak of the short models grows more slowly than that, it is taken to grow as fast: the figure is then too high, never too low.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from packhorse.search.strategy import FIGURES, Needs


@dataclass(frozen=True)
class Grown:
    """corners: (depth, samples) -> needs, of two depths and two numbers of samples (or of one of each, where only that is asked)."""

    corners: Mapping[tuple[int, int], Needs]

    def at(self, depth: int, samples: int) -> Needs:
        """The needs at any depth and number of samples."""
        depths, batches = sorted({d for d, _ in self.corners}), sorted({b for _, b in self.corners})

        def grown(of: Callable[[Needs], float]) -> float:
            at_batches = [_line(depths, [of(self.corners[d, b]) for d in depths], depth) for b in batches]
            return _line(batches, at_batches, samples)

        figures = {name: grown(lambda needs: getattr(needs, name)) for name in FIGURES}  # noqa: B023
        if len(depths) > 1:
            base = Grown({(depths[-1], b): self.corners[depths[-1], b] for b in batches}).at(depths[-1], samples)
            more = figures["saved_bytes"] - base.saved_bytes
            figures["arena"] = max(figures["arena"], base.arena + base.external + more - figures["external"])
        return Needs(**figures)


def _line(places: list[int], values: list[float], place: int) -> float:
    """Through one or two points."""
    if len(places) == 1:
        return values[0]
    slope = (values[1] - values[0]) / (places[1] - places[0])
    return values[0] + slope * (place - places[0])
