"""Seconds of an operator on a machine that was described and not calibrated. No torch."""

from bisect import bisect_right
from dataclasses import dataclass
from math import log


@dataclass(frozen=True)
class Products:
    """Products of matrices in one dtype. peak: flops a second; efficiency: (flops of one call, share of the peak), ascending in flops."""

    peak: float
    efficiency: tuple[tuple[float, float], ...]

    def share(self, flops: int) -> float:
        """Share of the peak that a call of so many flops reaches: linear in log(flops) between two entries, constant beyond the first and last."""
        above = bisect_right([size for size, _ in self.efficiency], flops)
        if above in (0, len(self.efficiency)):
            return self.efficiency[min(above, len(self.efficiency) - 1)][1]
        (least, low), (most, high) = self.efficiency[above - 1 : above + 1]
        return low + (high - low) * log(flops / least) / log(most / least)

    def seconds(self, flops: int) -> float:
        """Seconds of so many flops in one call."""
        return flops / (self.peak * self.share(flops))


@dataclass(frozen=True)
class Roofline:
    """A kernel takes as long as its flops or its bytes, whichever is longer (Williams, Waterman and Patterson 2009), and its launch.

    products: dtype of the IR -> its products; a dtype that is not there counts as "f32", which always is. bytes_per_s: of the memory, as kernels
    reach it. launch_s: what a kernel takes that does nothing.
    """

    products: dict[str, Products]
    bytes_per_s: float
    launch_s: float

    def seconds(self, num_bytes: int, flops: int, dtype: str) -> float:
        """Seconds of one call."""
        busy = num_bytes / self.bytes_per_s
        if flops:
            busy = max(busy, self.products.get(dtype, self.products["f32"]).seconds(flops))
        return self.launch_s + busy
