"""Budgets: what a person writes as bytes, and the answer when no plan fits."""

from packhorse.errors import BudgetError, UserError
from packhorse.planning.plan import Plan
from packhorse.units import format_bytes, parse_bytes


def budget_bytes(budget: int | str | None, keep_everything: int) -> int | None:
    """A budget as bytes: None, a number of bytes, "20GiB", "40%" of the keep-everything peak, or "minimum" of the method.

    Raises BudgetError for anything else.
    """
    if budget is None or budget == "minimum":
        return None
    if isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0:
        return budget
    if isinstance(budget, str) and budget.strip().endswith("%"):
        try:
            share = float(budget.strip()[:-1])
        except ValueError:
            share = -1.0
        if 0 < share <= 100:
            return int(keep_everything * share / 100)
        raise BudgetError(f"cannot read the budget {budget!r}; a share is of the step that keeps everything, above 0% and at most 100%, such as 40%")
    try:
        if isinstance(budget, str):
            return parse_bytes(budget)
    except UserError:
        pass
    raise BudgetError(f"cannot read the budget {budget!r}; write a number of bytes, 6GiB, 40% or minimum")


def too_small(plan: Plan, limit: int, others: dict[str, int]) -> BudgetError:
    """The error for a budget of `limit` bytes that the leanest plan of the method exceeds. others: method -> the least that works with it."""
    from packhorse.planning.ledger import ledger_of

    ledger = ledger_of(plan)
    alive = "; ".join(f"{format_bytes(row.num_bytes)} {row.name} ({row.place})" for row in ledger.alive[:10])
    rest = plan.arena_bytes + plan.external_bytes
    states = sum(run.num_bytes for run in plan.persistent.runs if run.kind == "optimizer states")
    changes = [f"recompute={method!r} fits in {format_bytes(least)}" for method, least in others.items() if least <= limit]
    if states and plan.peak_bytes - states <= limit:
        changes.append(f"an optimizer without states saves {format_bytes(states)}, which is enough")
    parts = next((k for k in (2, 4, 8, 16, 32, 64) if plan.persistent_bytes + rest / k <= limit), None)
    if parts is not None:
        changes.append(f"a micro-batch of 1/{parts} of the samples (num_micro_batches={parts * plan.options.num_micro_batches}) needs about ")
        changes[-1] += format_bytes(plan.persistent_bytes + rest // parts)
    if not changes:
        changes.append("the parameters, gradients and optimizer states alone leave too little: a smaller model, or states in fewer bits")
    return BudgetError(
        f"the budget of {format_bytes(limit)} ({limit} bytes) is too small: with recompute={plan.options.recompute!r} the least that works is "
        f"{format_bytes(plan.peak_bytes)} ({plan.peak_bytes} bytes), of which {format_bytes(plan.persistent_bytes)} are parameters, gradients, "
        f"optimizer states and buffers; the peak is at {ledger.instant}, where these are alive: {alive}; the nearest changes that fit: "
        f"{'; '.join(changes)}; or raise the budget"
    )
