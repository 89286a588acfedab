"""The same nets at a size that runs here: every curve's plan run for real, beside each other from the same weights on the same batch."""

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import packhorse
from packhorse.bench.replan import replanned
from packhorse.bench.step import cost
from packhorse.planning.plan import Plan
from packhorse.reproduce.curves import CURVES, feature_bytes
from packhorse.reproduce.workloads import Workload

NUM_STEPS = 2
BASE = "sharing"  # keeps everything, with all else that a plan does: what recomputation is compared with
LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Run:
    """One curve's plan, run. predicted, measured: peak bytes of the whole step. feature_bytes, measured_feature_bytes: without what persists.

    losses: of the first steps. predicted_time, measured_time: seconds of a step over those of BASE; measured in CPU time, the median over rounds of
    the ratio inside a round.
    """

    curve: str
    method: str
    predicted_bytes: int
    measured_bytes: int
    feature_bytes: int
    measured_feature_bytes: int
    losses: tuple[float, ...]
    predicted_time: float
    measured_time: float


def run_all(workload: Workload, size: int, rounds: int, names: tuple[str, ...] = tuple(CURVES)) -> list[Run]:
    """Every curve of `names` (BASE among them) at one size: planned, compiled, run for NUM_STEPS steps, then timed in turn."""
    torch.manual_seed(0)
    model, batch = workload.make(size)
    model.train()
    base = packhorse.plan(model, batch, optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), recompute="none")
    peaks: dict[str, int] = {}
    steps: dict[str, Callable[[Any], Any]] = {}
    plans: dict[str, Plan] = {}
    losses: dict[str, tuple[float, ...]] = {}
    measured: dict[str, tuple[int, int]] = {}
    for name in names:
        mine = copy.deepcopy(model)
        plan = plans[name] = _plan(name, base, mine, peaks)
        peaks[name] = plan.peak_bytes
        step = packhorse.compile(mine, plan)
        losses[name] = tuple(step(batch).item() for _ in range(NUM_STEPS))
        ledger = step.ledger()
        found = dict(ledger.measured)
        assert ledger.measured_peak_bytes is not None
        measured[name] = ledger.measured_peak_bytes, found["arena"] + found["external"]
        steps[name] = step
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(cost(partial(step, batch)).cpu_s)
    return [
        Run(
            name,
            plan.options.recompute,
            plan.peak_bytes,
            measured[name][0],
            plan.arena_bytes + plan.external_bytes,
            measured[name][1],
            losses[name],
            plan.seconds / plans[BASE].seconds,
            statistics.median(mine / theirs for mine, theirs in zip(seconds[name], seconds[BASE])),
        )
        for name, plan in plans.items()
    ]


def _plan(name: str, base: Plan, model: torch.nn.Module, peaks: dict[str, int]) -> Plan:
    curve = CURVES[name]
    given = replace(base, options=replace(base.options, in_place=curve.in_place, share=curve.share))
    budget = peaks[curve.like] if curve.like else curve.budget
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return min((replanned(given, model, optimizer, method, budget) for method in curve.methods), key=feature_bytes)
