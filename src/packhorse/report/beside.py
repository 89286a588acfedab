"""Parts of the page about what is not in the arena: the streams beside the computation, the host's pool, and what a run has measured. No torch."""

from packhorse.planning.plan import Plan
from packhorse.planning.step_seconds import StepSeconds, without_links
from packhorse.planning.timeline import COMPUTATION
from packhorse.report.measured import Measured
from packhorse.report.table import Cell, swatch, table
from packhorse.units import format_bytes


def streams_section(plan: Plan, found: StepSeconds) -> str:
    """The time line and its table; "" where nothing runs beside the computation."""
    if not found.streams:
        return ""
    rows = []
    for stream, seconds in found.busy.items():
        waited = found.stalls.get(stream, 0.0)
        own = [] if stream == COMPUTATION else [f"{waited * 1e3:.3f}", f"{max(0.0, seconds - waited) * 1e3:.3f}"]
        cells = [f"{seconds * 1e3:.3f}", *(own or ["", ""])]
        rows.append([Cell(stream, before=swatch("forward" if stream == COMPUTATION else stream)), *(Cell(cell, "number") for cell in cells)])
    waits = sum(found.stalls.values())
    rows.append([Cell("waits", before=swatch("stall")), Cell(f"{waits * 1e3:.3f}", "number"), Cell(""), Cell("")])
    heads = [Cell("stream"), *(Cell(head, "number") for head in ("milliseconds a step", "of it waited for", "hidden behind computation"))]
    notes = "".join(f"<p>{sentence[0].upper()}{sentence[1:]}.</p>" for sentence in without_links(found, plan.device))
    return (
        '<section aria-labelledby="line-title"><h2 id="line-title">Time line: computation, collectives, copies</h2>'
        "<p>As the device file foretells it: what the program starts beside the computation runs on a stream of its own, one after another, and the "
        f'computation waits where the program waits.</p>{notes}<div class="plot" id="line"></div>{table(heads, rows)}</section>'
    )


def pool_section(plan: Plan) -> str:
    """The picture of the host's pool; "" where nothing lies there."""
    pool = plan.host_bytes - plan.persistent.host_bytes
    if not pool:
        return ""
    states = plan.persistent.host_bytes
    besides = f" Optimizer states lie beside them, {format_bytes(states)}." if states else ""
    return (
        '<section aria-labelledby="pool-title"><h2 id="pool-title">On the host: time × offset</h2>'
        f"<p>What waits in the host's memory for a while, {format_bytes(pool)} in all, which the peak does not count.{besides}</p>"
        '<div class="plot" id="pool"></div></section>'
    )


def measured_section(plan: Plan, measured: Measured | None) -> str:
    """Predicted against measured; "" for a plan that was not run."""
    if measured is None:
        return ""
    seconds = measured.seconds
    of_bytes = [
        ("peak", plan.peak_bytes, measured.peak_bytes),
        ("on the host", plan.host_bytes, measured.host_bytes),
        ("sent to other ranks each step", plan.comm_bytes, measured.sent_bytes),
    ]
    rows = [(name, format_bytes(told), None if found is None else format_bytes(found)) for name, told, found in of_bytes if told]
    ratio = "" if seconds is None else f"{seconds:.4g} s, {seconds / max(plan.seconds, 1e-12):.2f} times the predicted"
    rows.append((f"a step, predicted for {plan.device.name}", f"{plan.seconds:.4g} s", ratio or None))
    shown = [[Cell(name), Cell(foretold, "number"), Cell(found or "predicted only", "number")] for name, foretold, found in rows]
    heads = [Cell("of rank 0"), Cell("predicted", "number"), Cell("measured", "number")]
    told = f"From the run's metrics.jsonl, {measured.steps} step{'s' * (measured.steps > 1)}; seconds are the median."
    return f'<section aria-labelledby="measured"><h2 id="measured">Predicted and measured</h2><p>{told}</p>{table(heads, shown)}</section>'
