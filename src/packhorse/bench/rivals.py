"""The contestants of the benchmarks: the same model, batch, optimizer and starting weights, each as a function that takes one step."""

import copy
from collections.abc import Callable
from typing import Any

import torch

import packhorse
from packhorse.models.gpt import GPT


def starting_point(shape: dict[str, int], dropout: float, seed: int) -> tuple[GPT, dict[str, torch.Tensor]]:
    """A GPT and a batch. shape: vocab, width, heads, layers, seq_len, batch."""
    torch.manual_seed(seed)
    model = GPT(vocab=shape["vocab"], layers=shape["layers"], width=shape["width"], heads=shape["heads"], seq_len=shape["seq_len"], dropout=dropout)
    size = (shape["batch"], shape["seq_len"])
    return model.train(), {"ids": torch.randint(0, shape["vocab"], size), "labels": torch.randint(0, shape["vocab"], size)}


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def loss_of(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The scalar output, or the output's `.loss`."""
    output = model(**batch)
    return output if isinstance(output, torch.Tensor) else output.loss


def eager(model: torch.nn.Module, batch: dict[str, torch.Tensor], set_to_none: bool = False) -> Callable[[], Any]:
    """Plain PyTorch; gradients stay allocated between steps unless `set_to_none`."""
    return _eager(copy.deepcopy(model), batch, lambda m: m, set_to_none)


def compiled(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """The same loop with the model through torch.compile (inductor; needs a C++ compiler)."""
    return _eager(copy.deepcopy(model), batch, torch.compile, False)


def _eager(model: torch.nn.Module, batch: dict[str, torch.Tensor], wrap: Callable, set_to_none: bool) -> Callable[[], Any]:
    optimizer, forward = _optimizer(model), wrap(model)

    def step() -> Any:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = forward(**batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def planned(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[Callable[[], Any], Any]:
    """packhorse, keeping everything; also the compiled step."""
    mine = copy.deepcopy(model)
    plan = packhorse.plan(mine, batch, optimizer=_optimizer(mine), recompute="none")
    step = packhorse.compile(mine, plan)
    return lambda: step(batch), step
