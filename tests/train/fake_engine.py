"""Plain eager PyTorch behind the surface that the trainer uses, so that the trainer is tested by itself."""

import copy
import os
import signal
from dataclasses import dataclass, field
from typing import Any

import torch

from packhorse.errors import NonFiniteError


@dataclass
class FakePlan:
    options: dict[str, Any]
    peak_bytes: int = 1000
    flops: int = 10**6

    def __str__(self):
        return "the plan's ledger"

    def to_dict(self):
        return {"peak_bytes": self.peak_bytes}

    def explain(self, stage):
        return f"explained {stage}"


@dataclass
class FakeLedger:
    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_comm_bytes: int = 0
    measured_comm_bytes: int | None = None
    measured_host_bytes: int | None = None

    def __str__(self):
        return "the measured ledger"


@dataclass
class FakeLast:
    grad_norm: float = 0.0
    clipped_norm: float = 0.0
    skipped: bool = False
    loss_scale: float | None = None


class FakeStep:
    def __init__(self, engine, model, plan):
        self.engine, self.model, self.optimizer = engine, model, plan.options["optimizer"]
        self.clip_norm = plan.options["clip_norm"]
        self.last, self.loss_scale, self.ranks = FakeLast(), None, None

    def __call__(self, batch, measure_outside=False):
        self.engine.batches.append(batch)
        self.engine.lrs.append(self.optimizer.param_groups[0]["lr"])
        self.engine.on_step(len(self.engine.batches))
        self.model.train()
        parts = batch if isinstance(batch, list) else [batch]
        self.optimizer.zero_grad()
        losses = [self.model(**part) / len(parts) for part in parts]
        loss = sum(losses)
        if len(self.engine.batches) == self.engine.nan_at or not torch.isfinite(loss):
            raise NonFiniteError("the loss is nan")
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm).item()
        self.last = self.engine.last or FakeLast(norm, min(norm, self.clip_norm))
        self.optimizer.step()
        return loss.detach()

    def evaluate(self, batch):
        self.engine.on_evaluate()
        self.model.eval()
        with torch.no_grad():
            return self.model(**batch).item()

    def ledger(self):
        return FakeLedger(1000, self.engine.measured)

    def trace_nonfinite(self, batch):
        return "it begins in blocks.1.attention"

    def training_state(self):
        tensors = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        for index, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{index}/{name}": tensor for name, tensor in moments.items()}
        for index, parameter in enumerate(p for group in self.optimizer.param_groups for p in group["params"]):
            for name in ("exp_avg", "exp_avg_sq"):
                tensors.setdefault(f"optimizer/{index}/{name}", torch.zeros_like(parameter))
            tensors.setdefault(f"optimizer/{index}/step", torch.zeros(()))
        return tensors | {"random": torch.get_rng_state()}, {}

    def load_training_state(self, tensors, meta):
        self.model.load_state_dict({name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")})
        state = copy.deepcopy(self.optimizer.state_dict())
        for name, tensor in tensors.items():
            if name.startswith("optimizer/"):
                _, index, key = name.split("/")
                state["state"].setdefault(int(index), {})[key] = tensor
        self.optimizer.load_state_dict(state)
        torch.set_rng_state(tensors["random"])


@dataclass
class FakeEngine:
    """`on_step(n)` is called at the start of the n-th step of this engine, `on_evaluate()` before each evaluated batch."""

    nan_at: int | None = None
    measured: int = 1000
    last: FakeLast | None = None
    on_step: Any = lambda number: None
    on_evaluate: Any = lambda: None
    batches: list = field(default_factory=list)
    lrs: list = field(default_factory=list)
    options: dict = field(default_factory=dict)

    def plan(self, model, batch, **options):
        self.options = options | {"batch": batch}
        return FakePlan(options)

    def compile(self, model, plan, scheduler=None):
        return FakeStep(self, model, plan)


def send(signal_number):
    os.kill(os.getpid(), signal_number)


def terminate_at(step):
    return lambda number: send(signal.SIGTERM) if number == step else None
