"""step -> learning rate, a pure function, so resuming needs no state."""

import math

from packhorse.train.config import ScheduleConfig


def learning_rate(step: int, *, steps: int, peak_lr: float, schedule: ScheduleConfig) -> float:
    """Learning rate of `step`, counted from 0, of a run of `steps` steps.

    Warm-up of w = schedule.warmup_steps:  peak_lr (step + 1) / w        so that step w - 1 trains at peak_lr, and no step at 0
    then, "cosine":    min_lr + (peak_lr - min_lr) (1 + cos(pi p)) / 2   p from 0 at step w to 1 at the last step; min_lr beyond
    or, "constant":    peak_lr
    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5, without restarts.
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return peak_lr * (step + 1) / warmup
    if schedule.kind == "constant":
        return peak_lr
    min_lr = peak_lr / 10 if schedule.min_lr is None else schedule.min_lr
    progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return min_lr + (peak_lr - min_lr) * (1 + math.cos(math.pi * progress)) / 2
