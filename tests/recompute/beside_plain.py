"""A step with recomputation beside plain PyTorch's: every bit of losses, gradients, parameters, buffers and random states, and every byte as predicted."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

import packhorse as ph
from packhorse.bench.replan import replanned
from packhorse.planning.plan import Plan

METHODS = ("cheap", "sqrt", "chen", "recursive", "blocks", "optimal")  # milp solves small graphs only, and takes seconds


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def loss_of(model: torch.nn.Module, micro: Any, loss: Callable | None) -> torch.Tensor:
    output = model(**micro) if isinstance(micro, dict) else model(*micro) if isinstance(micro, tuple) else model(micro)
    if loss is not None:
        return loss(output, micro)
    return output if isinstance(output, torch.Tensor) else output.loss


class Plain:
    """Steps of plain PyTorch on a copy of the model. micros: the micro-batches of a step.

    losses: of each step. grads: unclipped, of the last. state: parameters and buffers after it. random: the default generator's state.
    """

    def __init__(self, model: torch.nn.Module, micros: list, loss: Callable | None = None, clip_norm: float | None = 1.0, steps: int = 3):
        self.model = copy.deepcopy(model)
        optimizer = adamw(self.model.parameters())
        torch.manual_seed(5)
        self.losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            total = 0.0
            for micro in micros:
                value = loss_of(self.model, micro, loss) / len(micros) if len(micros) > 1 else loss_of(self.model, micro, loss)
                value.backward()
                total = total + value.detach()
            self.grads = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm)
            optimizer.step()
            self.losses.append(total)
        self.state = self.model.state_dict()
        self.random = torch.get_rng_state()


def assert_same(step, batch, plain: Plain, label: str) -> None:
    """Runs `step`, compiled from a model as `plain` began with, and compares all there is."""
    torch.manual_seed(5)
    for k, wanted in enumerate(plain.losses):
        assert torch.equal(step(batch), wanted), f"{label}: loss of step {k}"
    assert torch.equal(torch.get_rng_state(), plain.random), f"{label}: random state"
    grads = step.grads()
    assert grads.keys() == plain.grads.keys()
    for name, grad in plain.grads.items():
        assert torch.equal(grads[name], grad), f"{label}: gradient of {name}"
    for name, tensor in step.model.state_dict().items():
        assert torch.equal(tensor, plain.state[name]), f"{label}: {name}"
    assert_as_predicted(step, label)


def assert_as_predicted(step, label: str = "") -> None:
    ledger = step.ledger()
    assert ledger.measured_peak_bytes == ledger.predicted_peak_bytes, label
    assert not ledger.differences, label


def num_mirrors(plan: Plan) -> int:
    return sum(node.phase == "recompute" and not node.is_view for planned in plan.programs.values() for node in planned.graph.nodes)


def plans_of(model: torch.nn.Module, batch: Any, methods=METHODS, **options) -> Iterator[tuple[str, torch.nn.Module, Plan]]:
    """(method, copy of the model, the method's leanest plan of it), from one capture."""
    origin = copy.deepcopy(model)
    none = ph.plan(origin, batch, optimizer=adamw(origin.parameters()), recompute="none", **options)
    for method in methods:
        mine = copy.deepcopy(model)
        yield method, mine, replanned(none, mine, adamw(mine.parameters()), method, "minimum")


def assert_methods_like_plain(model, batch, *, loss=None, clip_norm=1.0, steps=3, methods=METHODS, mirrors=True) -> dict[str, Plan]:
    """Every method's leanest plan takes the steps that plain PyTorch takes. batch: one micro-batch, or a list of them. mirrors: each recomputes something."""
    micros = batch if isinstance(batch, list) else [batch]
    plain = Plain(model, micros, loss, clip_norm, steps)
    found = {}
    for method, mine, plan in plans_of(model, batch, methods, loss=loss, clip_norm=clip_norm, num_micro_batches=len(micros)):
        assert not mirrors or num_mirrors(plan) > 0, f"{method} recomputes nothing"
        assert_same(ph.compile(mine, plan), batch, plain, method)
        found[method] = plan
    return found
