"""y = a + b f(n) by least squares, and how much of the spread of y it explains. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fit:
    """y = a + b f(n). r2: 1 - residuals over spread (1 is a perfect fit)."""

    a: float
    b: float
    r2: float


def fit(points: Sequence[tuple[float, float]], of: Callable[[float], float]) -> Fit:
    """points: at least three (n, y) of different n. of: f."""
    xs, ys = [of(n) for n, _ in points], [y for _, y in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    b = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys)) / sum((x - mean_x) ** 2 for x in xs)
    a = mean_y - b * mean_x
    spread = sum((y - mean_y) ** 2 for y in ys)
    rest = sum((y - a - b * x) ** 2 for x, y in zip(xs, ys))
    return Fit(a, b, 1 - rest / spread if spread else 1.0)
