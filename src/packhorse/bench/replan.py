"""Many plans of one captured step: a benchmark that plans a model a hundred times captures it once."""

from dataclasses import replace

import torch

from packhorse.capture.trace import distinct
from packhorse.planning.choose import make_plan
from packhorse.planning.plan import Plan
from packhorse.runtime.job import group_structure, modes_of


def replanned(plan: Plan, model: torch.nn.Module, optimizer: torch.optim.Optimizer, method: str, budget: int | str | None) -> Plan:
    """What packhorse.plan(model, batch, optimizer=optimizer, recompute=method, budget=budget) gives, without its capture.

    plan: of recompute="none", whose graphs are the captured ones. model, optimizer: a deep copy of what it was made for, and an optimizer of the same
    settings over it. Raises BudgetError as packhorse.plan does.
    """
    assert plan.options.recompute == "none"
    parameters = distinct(model.named_parameters(remove_duplicate=False))
    job = replace(plan.job, optimizer=optimizer, parameters=parameters, modes=modes_of(model), structure=group_structure(optimizer))
    graphs = {name: planned.graph for name, planned in plan.programs.items()}
    return make_plan(graphs, plan.persistent, replace(plan.options, recompute=method, budget=budget), plan.device, job)
