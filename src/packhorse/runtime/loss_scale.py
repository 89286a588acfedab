"""The loss scale of fp16: gradients are computed of the loss times a power of two, so that small ones do not round to zero.

An overflow halves it and skips the step; `growth_interval` steps without one double it.
Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2; the defaults are those of torch.amp.GradScaler.
"""

import math
from dataclasses import dataclass
from typing import Any

from packhorse.errors import UserError

LEAST = 1.0


@dataclass
class LossScale:
    """`value` may be set at any time; it stays a power of two, by which scaling is exact."""

    value: float = 2.0**16
    growth_interval: int = 2000
    good_steps: int = 0  # since the last change

    def check(self) -> None:
        """Raises UserError unless the value is a power of two."""
        if not (self.value > 0 and math.isfinite(self.value) and math.frexp(self.value)[0] == 0.5):
            raise UserError(
                f"the loss scale is {self.value!r}; expected a power of two such as 65536.0, so that scaling rounds nothing: "
                f"{2.0 ** round(math.log2(self.value)) if self.value > 0 else 65536.0} is near"
            )

    def update(self, overflow: bool) -> None:
        """After a step."""
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.value /= 2
        elif self.good_steps >= self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0

    def state(self) -> dict[str, Any]:
        """JSON-able: what a checkpoint keeps."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load(self, state: dict[str, Any]) -> None:
        """Takes over what `state` gave; the growth interval stays."""
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
