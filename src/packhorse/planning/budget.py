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
    """The error for a budget of `limit` bytes that the leanest plan of the method exceeds. others: method -> peak of its plan within the limit."""
    from packhorse.planning.ledger import ledger_of

    ledger = ledger_of(plan)
    alive = "; ".join(f"{format_bytes(row.num_bytes)} {row.name} ({row.place})" for row in ledger.alive[:10])
    states = sum(run.num_bytes for run in plan.persistent.runs if run.kind == "optimizer states")
    changes = [f"recompute={method!r}, which needs {format_bytes(peak)}" for method, peak in others.items()]
    if states and plan.peak_bytes - states <= limit:
        changes.append(f"an optimizer without states, which saves {format_bytes(states)}")
    fits = f"the nearest changes that fit: {'; '.join(changes)}" if changes else ""
    parts = _fewer_samples(plan, limit)
    if parts is not None:
        fits += f"{'; ' if fits else ''}by estimate num_micro_batches={parts * plan.options.num_micro_batches} with 1/{parts} of the samples in each"
    if not fits:
        fits = "no nearer change fits: take a smaller model or shorter samples, or an optimizer with fewer states"
    return BudgetError(
        f"the budget of {format_bytes(limit)} ({limit} bytes) is too small: with recompute={plan.options.recompute!r} the least that works is "
        f"{format_bytes(plan.peak_bytes)} ({plan.peak_bytes} bytes), of which {format_bytes(plan.persistent_bytes)} are parameters, gradients, "
        f"optimizer states and buffers; the peak is at {ledger.instant}, where these are alive: {alive}; {fits}; or raise the budget"
    )


def _fewer_samples(plan: Plan, limit: int) -> int | None:
    """In how many equal parts the samples of a micro-batch may have to be divided to fit; None if even single samples are too many.

    An estimate: what is not persistent shrinks with the samples, but for saved random states and, as gradients are added up, one gradient.
    """
    first = plan.programs["first"]
    leading = {given.value.shape[0] for given in first.graph.inputs if given.role == "batch" and given.value.shape}
    if len(leading) != 1:
        return None
    samples = leading.pop()
    gradients = [slot.value.extent_bytes for run in plan.persistent.runs if run.kind == "gradients" for slot in run.slots]
    fixed = max(gradients, default=0) + sum(s.size for s in first.placement.storages if s.name.startswith(".state"))
    shrinks = max(0, plan.peak_bytes - plan.persistent_bytes - fixed)
    fitting = (k for k in range(2, samples + 1) if samples % k == 0 and plan.persistent_bytes + fixed + shrinks // k <= limit)
    return next(fitting, None)
