"""`packhorse report`: a plan as one self-contained HTML page, to open in a browser without a network. No torch.

Figures and tables are made here, so that they can be read without a script; the two pictures are drawn by the scripts from the JSON in the page.
"""

import os
from base64 import b64encode
from contextlib import suppress
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from packhorse.errors import UserError
from packhorse.planning.budget import budget_bytes
from packhorse.planning.plan import Plan
from packhorse.planning.step_seconds import step_seconds
from packhorse.planning.waiting import tally
from packhorse.report.again import made_again
from packhorse.report.bands import Instant, alive_bytes, bands_at, most_of_bands, peak_instant
from packhorse.report.beside import measured_section, pool_section, streams_section
from packhorse.report.data import page_data, script_safe
from packhorse.report.kinds import ON_HOST, stays_on_host
from packhorse.report.measured import Measured
from packhorse.report.table import Cell, swatch, table
from packhorse.units import format_bytes

_SCRIPTS = ("step.js", "plot.js", "pictures.js", "line.js", "pointing.js")  # one after another, in one scope
_LARGEST = 10
_AGAIN_ROWS = 40


def write_report(plan: Plan, path: Path | str, title: str = "packhorse: the plan of a training step", measured: Measured | None = None) -> Path:
    """Write the page of a plan to `path` and return it. What was there before is replaced only when the new page is whole.

    measured: of the run whose plan it is.

    Raises UserError if the folder does not exist, or if the file cannot be written.
    """
    path = Path(path)
    check_target(path)
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(page(plan, title, measured), encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise UserError(f"cannot write the report {path}: {error.strerror}; give another file with --out") from None
    return path


def check_target(path: Path) -> None:
    """Raises UserError if `path` cannot be a new file: its folder does not exist, or it is a folder itself."""
    if path.is_dir():
        raise UserError(f"cannot write the report {path}: it is a folder; give the name of a file with --out, for example {path / 'report.html'}")
    if not path.parent.is_dir():
        raise UserError(f"cannot write the report {path}: there is no folder {path.parent}; make it first, or give another file with --out")


def page(plan: Plan, title: str, measured: Measured | None = None) -> str:
    """The page as text. All names that come from the user are escaped; the page forbids itself every script but its own."""
    script, instant = _script(), peak_instant(plan)
    return Template(_part("template.html")).substitute(
        title=escape(title),
        style=_part("page.css"),
        script=script,
        script_hash="sha256-" + b64encode(sha256(script.encode()).digest()).decode(),
        data=script_safe(page_data(plan)),
        peak=format_bytes(plan.peak_bytes),
        persistent=format_bytes(plan.persistent_bytes),
        arena=format_bytes(plan.arena_bytes),
        external=format_bytes(plan.external_bytes),
        facts="".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in _facts(plan)),
        instant=_instant(plan, instant),
        legend=_legend(plan, instant),
        again=_again(plan),
        largest=_largest(plan, instant),
        programs=_programs(plan),
        measured=measured_section(plan, measured),
        pool=pool_section(plan),
        line=streams_section(plan, step_seconds(plan)),
    )


def _script() -> str:
    """One strict script, whose names are its own."""
    return "\n".join(['(() => {"use strict";', *map(_part, _SCRIPTS), "})();"])


def _part(name: str) -> str:
    return files("packhorse.report").joinpath(name).read_text(encoding="utf-8")


def _facts(plan: Plan) -> list[tuple[str, str]]:
    """What the header says besides the peak."""
    limit = budget_bytes(plan.options.budget, plan.keep_everything_bytes)
    elsewhere = [("On the host", format_bytes(plan.host_bytes))] if plan.host_bytes else []
    elsewhere += [("Sent to other ranks each step", format_bytes(plan.comm_bytes))] if plan.comm_bytes else []
    return [
        ("Budget", str(plan.options.budget or "none") if limit is None else format_bytes(limit)),
        ("Peak if everything is kept", format_bytes(plan.keep_everything_bytes)),
        ("Method of recomputation", plan.options.recompute),
        ("Recomputed flops", f"{plan.overhead_flops:.3e} of {plan.flops:.3e}" if plan.overhead_flops else "0"),
        (f"Predicted step on {plan.device.name}", f"{plan.seconds:.4g} s"),
        ("of which recomputation", f"{plan.overhead_seconds:.4g} s"),
        ("Micro-batches", str(plan.options.num_micro_batches)),
        ("Residency of saved values", plan.options.residency),
        *elsewhere,
    ]


def _instant(plan: Plan, instant: Instant) -> str:
    """The peak instant in words, and why the reserved peak may lie above it."""
    nodes = plan.programs[instant.program].graph.nodes
    text = f"Most is alive in <b>{escape(instant.program)}</b>, time {instant.time}"
    if nodes:
        node = nodes[instant.time]
        text += f" ({escape(' '.join(part for part in (node.phase, node.op, node.module and 'in ' + node.module, node.source) if part))})"
    text += f": {format_bytes(instant.num_bytes)}."
    over = plan.peak_bytes - instant.num_bytes
    if over < 0:
        text += f" {format_bytes(-over)} of that lie in memory of gradients that are not made yet, which the peak counts once."
    if over > 0:
        text += f" The peak is {format_bytes(over)} above that: arena and external tensors are each reserved at their most, gaps included."
    return text


def _legend(plan: Plan, instant: Instant) -> str:
    """The categories with their colours and their bytes at the peak instant; those that are never there are left out."""
    most = most_of_bands(plan)
    rows = []
    for name, num_bytes in bands_at(instant, plan.persistent).items():
        if most.get(name):
            kind = name.removeprefix("external ")
            label = _MEANING.get(kind, kind) + (", allocated by its kernel" if kind != name else "")
            figures = (format_bytes(num_bytes), f"{num_bytes / max(instant.num_bytes, 1):.1%}", format_bytes(most[name]))
            rows.append([Cell(label, before=swatch(kind, kind != name)), *(Cell(figure, "number") for figure in figures)])
    total = [Cell("alive at the peak instant"), Cell(format_bytes(instant.num_bytes), "number"), Cell(""), Cell("")]
    heads = [Cell("category"), *(Cell(head, "number") for head in ("at the peak instant", "share", "at its most"))]
    if plan.host_bytes:
        planned = plan.programs[instant.program]
        now = alive_bytes(stays_on_host(planned), max(len(planned.graph.nodes), 1))[instant.time]
        cells = [Cell(format_bytes(now), "number"), Cell("besides", "number"), Cell(format_bytes(plan.host_bytes), "number")]
        rows.append([Cell("on the host", before=swatch(ON_HOST)), *cells])
    return table(heads, rows, foot=total) + _waits(plan)


def _waits(plan: Plan) -> str:
    """Where saved values wait, in one line."""
    told = tally(planned.graph for planned in plan.programs.values()).in_words(plan.options)
    return f"<p>{escape(told[0].upper() + told[1:])}.</p>" if told else ""


_MEANING = {
    "kept": "kept from forward to backward",
    "recomputed": "recomputed",
    "slice": "saved values as slices over tp",
    "leaving": "saved values until they leave",
    "back": "saved values that came back",
    "gathered": "gathered parameters",
    "temporary": "temporaries",
    "output": "outputs",
    "scratch": "scratch of kernels",
}


def _again(plan: Plan) -> str:
    parts: list[str] = []
    for name, planned in plan.programs.items():
        found = made_again(planned.graph, plan.device)
        if not found:
            continue
        rows = [
            [
                Cell(row.module or "(outermost)", "code"),
                Cell(row.op, "code"),
                Cell(row.source, "code"),
                Cell(str(row.values), "number"),
                Cell(str(row.nodes), "number"),
                Cell(format_bytes(row.freed), "number"),
                Cell(f"{row.flops:.3e}" if row.flops else "0", "number"),
                Cell(f"{row.seconds * 1e3:.3f}", "number"),
            ]
            for row in found[:_AGAIN_ROWS]
        ]
        more = found[_AGAIN_ROWS:]
        total = [
            Cell("all" if not more else f"all, with {len(more)} smaller rows that are not shown"),
            Cell(""),
            Cell(""),
            *(Cell(str(sum(getattr(row, key) for row in found)), "number") for key in ("values", "nodes")),
            Cell(format_bytes(sum(row.freed for row in found)), "number"),
            Cell(f"{sum(row.flops for row in found):.3e}", "number"),
            Cell(f"{sum(row.seconds for row in found) * 1e3:.3f}", "number"),
        ]
        heads = [Cell(head) for head in ("module", "operator", "line")]
        heads += [Cell(head, "number") for head in ("tensors", "calls made again", "bytes freed", "flops", "milliseconds")]
        opened = "" if parts else " open"  # later micro-batches repeat the first
        freed = format_bytes(sum(row.freed for row in found))
        parts.append(f"<details{opened}><summary>{escape(name)}: {freed} freed</summary>{table(heads, rows, foot=total)}</details>")
    if parts:
        parts.insert(0, "<p>Bytes freed are those that would else be kept from forward to backward; blocks that are alike are one row.</p>")
    return "".join(parts) or "<p>Nothing: everything that the backward pass needs is kept.</p>"


def _largest(plan: Plan, instant: Instant) -> str:
    nodes = plan.programs[instant.program].graph.nodes
    rows = []
    for stay in instant.alive[:_LARGEST]:
        node = nodes[stay.node]
        rows.append(
            [
                Cell(stay.name if stay.kind == "scratch" else f"%{stay.name}", "code"),
                Cell(format_bytes(stay.size), "number"),
                Cell(stay.kind + (", external" if stay.offset is None else ""), before=swatch(stay.kind, stay.offset is None)),
                Cell(node.module or "(outermost)", "code"),
                Cell(node.source, "code"),
                Cell(f"{node.phase} {node.op}", "code"),
            ]
        )
    if not rows:
        return "<p>None: only persistent storage is alive.</p>"
    heads = [Cell("tensor"), Cell("bytes", "number"), *map(Cell, ("kind", "module", "line", "made by"))]
    return table(heads, rows, caption=f"{instant.program}, time {instant.time}; {len(instant.alive)} tensors are alive")


def _programs(plan: Plan) -> str:
    heads = [Cell("program"), *(Cell(head, "number") for head in ("calls", "times a step", "arena", "lower bound", "fragmentation", "external"))]
    rows = []
    for name, planned in plan.programs.items():
        repeats = plan.times(name)
        layout = planned.layout
        sizes = (layout.height, layout.lower_bound, layout.fragmentation, planned.external_bytes)
        counts = (len(planned.graph.nodes), repeats)
        rows.append([Cell(name), *(Cell(str(n), "number") for n in counts), *(Cell(format_bytes(n), "number") for n in sizes)])
    return table(heads, rows)
