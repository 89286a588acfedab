"""What the trainer needs of packhorse itself: `plan` and `compile`, and what they return. The package `packhorse` is an Engine."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from packhorse.runtime.ranks import Ranks

Batch = dict[str, Tensor] | list[dict[str, Tensor]]


class Plan(Protocol):
    """A planned step. str() is its ledger; `flops` of one optimizer step, forward and backward."""

    @property
    def peak_bytes(self) -> int: ...

    @property
    def flops(self) -> int: ...

    def to_dict(self) -> dict[str, Any]: ...


class Ledger(Protocol):
    """Predicted and measured memory of the last step. str() shows the lines."""

    @property
    def predicted_peak_bytes(self) -> int: ...

    @property
    def measured_peak_bytes(self) -> int: ...

    @property
    def predicted_comm_bytes(self) -> int: ...

    @property
    def measured_comm_bytes(self) -> int | None: ...

    @property
    def measured_host_bytes(self) -> int | None: ...


class LastStep(Protocol):
    """Global norm of the gradient of the last step, before and after clipping; None where the plan has no clip_norm."""

    @property
    def grad_norm(self) -> float | None: ...

    @property
    def clipped_norm(self) -> float | None: ...

    @property
    def loss_scale(self) -> float | None: ...

    @property
    def skipped(self) -> bool: ...


class LossScale(Protocol):
    """The loss scale of fp16: a power of two, and after how many steps without an overflow it is doubled."""

    value: float
    growth_interval: int


class Step(Protocol):
    """A compiled step: call it with a batch for one optimizer step and its loss. ranks: all of the job; None where this process is alone."""

    @property
    def last(self) -> LastStep: ...

    @property
    def ranks(self) -> Ranks | None: ...

    @property
    def loss_scale(self) -> LossScale | None: ...

    def __call__(self, batch: Batch, measure_outside: bool = False) -> Tensor: ...

    def evaluate(self, batch: dict[str, Tensor]) -> float: ...

    def ledger(self) -> Ledger: ...

    def trace_nonfinite(self, batch: Batch) -> str: ...

    def training_state(self) -> tuple[Mapping[str, Any], dict[str, Any]]: ...

    def load_training_state(self, tensors: Mapping[str, Tensor], meta: dict[str, Any]) -> None: ...


class Engine(Protocol):
    """Model, batch and optimizer -> Plan -> Step."""

    def plan(self, model: Any, batch: Any, **options: Any) -> Plan: ...

    def compile(self, model: Any, plan: Any, scheduler: Any = None) -> Step: ...
