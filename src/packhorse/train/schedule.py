"""step -> learning rate, a pure function, so resuming needs no state."""

import math

from packhorse.train.config import ScheduleConfig


def learning_rate(step: int, *, steps: int, peak_lr: float, schedule: ScheduleConfig) -> float:
    """Learning rate of `step`, counted from 0, of a run of `steps` steps.

    Warm-up of w = schedule.warmup_steps:  peak_lr (step + 1) / w        so that step w - 1 trains at peak_lr, and no step at 0
    then, "cosine":    min_lr + (peak_lr - min_lr) (1 + cos(pi p)) / 2   p from 0 at step w to 1 at the last step; min_lr beyond
    or, "linear":      min_lr + (peak_lr - min_lr) (1 - p)               the same p
    or, "constant":    peak_lr
    A schedule of kind "torch" is none of these: it is an object with a state (optimizer.py).
    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5, without restarts.
    """
    warmup = schedule.warmup_steps
    assert warmup is not None, schedule.kind
    if step < warmup:
        return peak_lr * (step + 1) / warmup
    if schedule.kind == "constant":
        return peak_lr
    min_lr = peak_lr / 10 if schedule.min_lr is None else schedule.min_lr
    progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    share = 1 - progress if schedule.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return min_lr + (peak_lr - min_lr) * share
