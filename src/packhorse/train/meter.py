"""Durations of steps -> tokens per second, MFU and the time that is left. Only training counts: no first steps, evaluation or saving."""

from dataclasses import dataclass

# The first steps of a process fault memory in and warm caches; they say nothing about the rest.
NUM_WARMUP_STEPS = 2


@dataclass(frozen=True)
class Rate:
    """Averages of the steps since the last reading; None while only warm-up steps were seen. `mfu` is None where the peak is unknown."""

    step_s: float | None
    tokens_per_s: float | None
    mfu: float | None


class Meter:
    """Collects durations in seconds; knows no clock.

    step_tokens: that all ranks together train on, each counted once. step_flops: of one rank, as peak_flops is of one device.
    """

    def __init__(self, *, step_tokens: int, step_flops: int, peak_flops: float | None) -> None:
        self._step_tokens, self._step_flops, self._peak_flops = step_tokens, step_flops, peak_flops
        self._num_seen = 0
        self._window_s: list[float] = []
        self._total_s, self._num_counted = 0.0, 0
        self._other_s = 0.0

    def add_step(self, seconds: float) -> None:
        """One step of training took this long."""
        self._num_seen += 1
        if self._num_seen > NUM_WARMUP_STEPS:
            self._window_s.append(seconds)
            self._total_s += seconds
            self._num_counted += 1

    def add_other(self, seconds: float) -> None:
        """An evaluation or a checkpoint took this long."""
        self._other_s += seconds

    def read(self) -> Rate:
        """The rate since the last reading; starts a new one."""
        window, self._window_s = self._window_s, []
        if not window:
            return Rate(None, None, None)
        step_s = max(sum(window) / len(window), 1e-9)
        mfu = self._step_flops / step_s / self._peak_flops if self._peak_flops else None
        return Rate(step_s, self._step_tokens / step_s, mfu)

    def eta_s(self, num_steps_left: int) -> float | None:
        """Seconds that are left if steps, evaluations and checkpoints go on as they did; None before there is a rate."""
        if not self._num_counted:
            return None
        return num_steps_left * (self._total_s / self._num_counted + self._other_s / self._num_seen)
