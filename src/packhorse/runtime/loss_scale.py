"""The loss scale of fp16: gradients are computed of the loss times a power of two, so that small ones do not round to zero.

An overflow halves it and skips the step; `growth_interval` steps without one double it.
Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2; the defaults are those of torch.amp.GradScaler.
"""

import math
from dataclasses import dataclass
from typing import Any

from packhorse.errors import UserError

LEAST, MOST = 1.0, 2.0**126


@dataclass
class LossScale:
    """`value` may be set at any time; it stays a power of two, by which scaling is exact."""

    value: float = 2.0**16
    growth_interval: int = 2000
    good_steps: int = 0  # since the last change

    def check(self) -> None:
        """Raises UserError unless the value is a power of two from LEAST to MOST."""
        number = isinstance(self.value, (int, float)) and not isinstance(self.value, bool)
        if not (number and LEAST <= self.value <= MOST and math.frexp(self.value)[0] == 0.5):
            raise UserError(
                f"the loss scale is {self.value!r}; expected a power of two from {LEAST:g} to {MOST:g}, so that scaling rounds nothing: set "
                "step.loss_scale.value to 65536.0, for example"
            )

    def update(self, overflow: bool) -> None:
        """After a step."""
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.value /= 2
        elif self.good_steps >= self.growth_interval:
            self.value, self.good_steps = min(self.value * 2, MOST), 0

    def state(self) -> dict[str, Any]:
        """JSON-able: what a checkpoint keeps."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load(self, state: dict[str, Any]) -> None:
        """Takes over what `state` gave; the growth interval stays."""
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
