"""A step with recomputation beside plain PyTorch's: every bit of losses, gradients, parameters, buffers, random states; every byte as predicted."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

import packhorse as ph
from packhorse.bench.replan import replanned
from packhorse.capture.precision import Islands
from packhorse.planning.plan import Plan

METHODS = ("cheap", "sqrt", "chen", "recursive", "blocks", "optimal")  # milp solves small graphs only, and takes seconds
LOSS_SCALE = 1024.0  # of fp16: no step overflows
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def loss_of(model: torch.nn.Module, micro: Any, loss: Callable | None) -> torch.Tensor:
    output = model(**micro) if isinstance(micro, dict) else model(*micro) if isinstance(micro, tuple) else model(micro)
    if loss is not None:
        return loss(output, micro)
    return output if isinstance(output, torch.Tensor) else output.loss


class Plain:
    """Steps of plain PyTorch on a copy of the model, in 16 bits by the recipe of README.md. micros: the micro-batches of a step.

    losses: of each step. grads: unclipped, of the last. state: parameters and buffers after it. random: the default generator's state.
    """

    def __init__(self, model: torch.nn.Module, micros: list, *, loss=None, clip_norm=1.0, steps=3, precision="fp32", make=adamw):
        master, dtype, k = copy.deepcopy(model), DTYPES.get(precision), len(micros)
        scale = LOSS_SCALE if precision == "fp16" else 1.0
        narrow = copy.deepcopy(model) if dtype is not None else master
        optimizer = make(master.parameters())
        torch.manual_seed(5)
        self.losses = []
        for _ in range(steps):
            total: Any = 0.0
            for p, wide in zip(narrow.parameters(), master.parameters()):
                p.data, p.grad = wide.data if dtype is None else wide.data.to(dtype), None
            for micro in micros:
                if dtype is None:
                    value = loss_of(narrow, micro, loss)
                else:
                    with torch.autocast("cpu", dtype, cache_enabled=False), Islands("cpu"):
                        value = loss_of(narrow, micro, loss).float()
                value = value / k if k > 1 else value
                (value * scale).backward()
                total = total + value.detach()
            for p, wide in zip(narrow.parameters(), master.parameters()):
                wide.grad = None if p.grad is None else p.grad.float() / scale if dtype is not None else p.grad
            self.grads = {name: p.grad.clone() for name, p in master.named_parameters() if p.grad is not None}
            assert all(torch.isfinite(grad).all() for grad in self.grads.values())
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(master.parameters(), clip_norm)
            optimizer.step()
            self.losses.append(total)
        self.state = dict(master.named_parameters()) | dict(narrow.named_buffers())
        self.random = torch.get_rng_state()


def assert_same(step, batch, plain: Plain, label: str) -> None:
    """Runs `step`, compiled from a model as `plain` began with, and compares all there is."""
    if step.loss_scale is not None:
        step.loss_scale.value = LOSS_SCALE
    torch.manual_seed(5)
    for k, wanted in enumerate(plain.losses):
        assert torch.equal(step(batch), wanted), f"{label}: loss of step {k}"
    assert torch.equal(torch.get_rng_state(), plain.random), f"{label}: random state"
    grads = step.grads()
    assert grads.keys() == plain.grads.keys()
    for name, grad in plain.grads.items():
        assert torch.equal(grads[name].float(), grad.float()), f"{label}: gradient of {name}"
    for name, tensor in (*step.model.named_parameters(), *step.model.named_buffers()):
        assert torch.equal(tensor, plain.state[name]), f"{label}: {name}"
    assert_as_predicted(step, label)


def assert_as_predicted(step, label: str = "") -> None:
    ledger = step.ledger()
    assert ledger.measured_peak_bytes == ledger.predicted_peak_bytes, label
    assert not ledger.differences, label


def num_mirrors(plan: Plan) -> int:
    return sum(node.phase == "recompute" and not node.is_view for planned in plan.programs.values() for node in planned.graph.nodes)


def plans_of(model: torch.nn.Module, batch: Any, methods=METHODS, budget: Any = "minimum", **options) -> Iterator[tuple[str, torch.nn.Module, Plan]]:
    """(method, copy of the model, the method's plan of it), from one capture."""
    origin = copy.deepcopy(model)
    micros = len(batch) if isinstance(batch, list) else 1
    none = ph.plan(origin, batch, optimizer=adamw(origin.parameters()), recompute="none", num_micro_batches=micros, **options)
    for method in methods:
        mine = copy.deepcopy(model)
        yield method, mine, replanned(none, mine, adamw(mine.parameters()), method, budget)


def assert_methods_like_plain(model, batch, *, methods=METHODS, steps=3, mirrors=True, clip_norm=1.0, **options) -> dict[str, Plan]:
    """Every method's leanest plan takes the steps that plain PyTorch takes.

    batch: one micro-batch, or a list of them. mirrors: each plan recomputes something. Returns the plans by method.
    """
    given = {key: option for key, option in options.items() if key in ("loss", "precision")}
    plain = Plain(model, batch if isinstance(batch, list) else [batch], clip_norm=clip_norm, steps=steps, **given)
    found = {}
    for method, mine, plan in plans_of(model, batch, methods, clip_norm=clip_norm, **options):
        assert not mirrors or num_mirrors(plan) > 0, f"{method} recomputes nothing"
        assert_same(ph.compile(mine, plan), batch, plain, method)
        found[method] = plan
    return found
