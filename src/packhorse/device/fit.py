"""Measured calls of one operator -> its Cost. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np

from packhorse.device.device import Cost

_ROUNDS = 30


@dataclass(frozen=True)
class Sample:
    """One kind of call: bytes and flops as the device counts them, and the seconds that it took."""

    num_bytes: int
    flops: int
    seconds: float

    def ratio(self, cost: Cost) -> float:
        """Predicted / measured seconds."""
        return cost.of(self.num_bytes, self.flops) / self.seconds


def fit(samples: Sequence[Sample]) -> Cost:
    """The Cost, no part of it negative, with the least sum of sqrt(measured) * |predicted / measured - 1| over the samples (at least one).

    The square root stands between counting calls, of which most are short, and counting seconds, which a few long ones take. Absolute values, so
    that one odd shape does not decide. Solved by least squares with weights 1 / |error|, over and over; the non-negative solution is the best of
    those over each subset of the three parts, rounded to four digits.
    """
    rows = np.array([[1.0, s.num_bytes, s.flops] for s in samples]) / np.array([[s.seconds] for s in samples])
    scale = rows.max(axis=0)
    used = [column for column in range(3) if scale[column] > 0]
    rows = rows / np.where(scale > 0, scale, 1.0)
    matter = np.sqrt([s.seconds for s in samples])
    weights = matter
    best, least = np.zeros(3), np.inf
    for _ in range(_ROUNDS):
        found = _non_negative(rows, weights, used)
        errors = np.abs(rows @ found - 1)
        if matter @ errors < least:
            best, least = found, matter @ errors
        weights = matter / np.maximum(errors, 1e-3)
    return Cost(*(float(f"{part / size:.4g}") if size > 0 else 0.0 for part, size in zip(best, scale)))


def _non_negative(rows: np.ndarray, weights: np.ndarray, used: list[int]) -> np.ndarray:
    """The x >= 0 with the least sum of weights * (rows @ x - 1)**2; zero outside the columns `used`."""
    root = np.sqrt(weights)
    best, least = np.zeros(rows.shape[1]), np.inf
    for count in range(1, len(used) + 1):
        for columns in combinations(used, count):
            part, _, rank, _ = np.linalg.lstsq(rows[:, columns] * root[:, None], root, rcond=1e-9)
            if rank < count or (part < 0).any():  # calls of one size do not tell the parts apart
                continue
            x = np.zeros(rows.shape[1])
            x[list(columns)] = part
            error = float((weights * (rows @ x - 1) ** 2).sum())
            if error < least * (1 - 1e-9):  # of equals the one with the fewest parts, the fixed one first
                best, least = x, error
    return best


def spread(samples: Sequence[Sample], cost: Cost) -> float:
    """How far predictions are from measurements: the median of |predicted / measured - 1|."""
    return median(abs(sample.ratio(cost) - 1) for sample in samples)
