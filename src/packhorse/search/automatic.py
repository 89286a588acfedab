"""What "auto" stands for in `packhorse.plan`: mesh, stage of ZeRO, micro-batches."""

import os
from typing import Any

from packhorse.device.device import Device
from packhorse.errors import BudgetError, UserError
from packhorse.mesh import Mesh
from packhorse.planning.budget import budget_bytes
from packhorse.search.search import Within, search, usable_bytes
from packhorse.search.short import Short
from packhorse.search.strategy import Strategy


def found_budget(budget: int | str | None, device: Device) -> int:
    """Bytes that a step has to fit: the budget, or what the device has. Raises UserError where neither says, or the budget is a share."""
    if budget is None:
        return usable_bytes(device)
    if budget == "minimum" or (isinstance(budget, str) and budget.strip().endswith("%")):
        raise UserError(
            f"budget={budget!r} with an automatic mesh, stage or number of micro-batches: what it is a share of, or the least of, depends on what is "
            "sought; give bytes, such as '20GiB', or a device with a memory size"
        )
    found = budget_bytes(budget, 0)
    assert found is not None
    return found


def found_by_search(short: Short, mesh: Any, zero_stage: Any, num_micro_batches: Any, budget: int | str | None) -> Strategy:
    """The fastest strategy that keeps to what is given. Raises BudgetError if none fits, with the reason of each, and UserError for what is neither
    a value nor "auto"."""
    if not (mesh in (None, "auto") or isinstance(mesh, Mesh)) or zero_stage not in (0, 1, 2, 3, "auto"):
        raise UserError(f"mesh={mesh!r}, zero_stage={zero_stage!r}: expected a packhorse.Mesh, None or auto, and a stage from 0 to 3 or auto")
    given = mesh if isinstance(mesh, Mesh) else Mesh() if mesh is None else None
    num_ranks = given.world_size if given else int(os.environ.get("WORLD_SIZE", "1"))
    samples = short.samples
    if num_micro_batches == "auto":
        parts = [k for k in range(samples, 0, -1) if samples % k == 0]
        batches = tuple((samples // k, k) for k in parts)
    else:
        batches = ((samples, num_micro_batches),)
    stage = None if zero_stage == "auto" else zero_stage
    usable = found_budget(budget, short.device)
    answer = search(short, Within(num_ranks, batches, usable, given.tp if given else None, stage))
    if answer.best is None:
        reasons = "; ".join(f"dp {f.strategy.dp} x tp {f.strategy.tp}, stage {f.strategy.stage}: {f.why}" for f in answer.failures[:12])
        raise BudgetError(
            f"no strategy on {num_ranks} ranks fits {usable} bytes of each: {reasons}; raise the budget, take more ranks, or fewer samples in a batch"
        )
    return answer.best.strategy
