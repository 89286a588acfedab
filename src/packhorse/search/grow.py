"""What a deep model needs, from plans of the same model with few blocks. No torch.

With alike blocks every figure of a plan is an affine function of their number once there are a few of them: what a block makes, sends and computes is
the same for each. So two depths tell all others. Only a peak can change its instant on the way, to one that grows faster. Nothing grows faster with
depth than what all blocks save for the backward pass, so where the peak of the short models grows more slowly than that, it is taken to grow as fast:
the figure is then too high, never too low.
"""

from collections.abc import Mapping
from dataclasses import replace

from packhorse.search.strategy import FIGURES, Needs


def grown(short: Mapping[int, Needs], depth: int) -> Needs:
    """The needs of `depth` blocks. short: number of blocks -> needs, of one or two numbers."""
    (low, first), (high, last) = min(short.items()), max(short.items())
    if low == high:
        return last
    steps = (depth - high) / (high - low)
    figures = {name: getattr(last, name) + steps * (getattr(last, name) - getattr(first, name)) for name in FIGURES}
    saved = figures["saved_bytes"] - last.saved_bytes
    least = last.arena + last.external + saved - figures["external"]
    return replace(Needs(**figures), arena=max(figures["arena"], least))
