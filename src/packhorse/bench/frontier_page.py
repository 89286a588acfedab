"""The rows of `packhorse bench frontier` as Markdown tables and as a picture."""

from typing import Any

from packhorse.report.chart import line_chart

Row = Any  # packhorse.bench.frontier.Row, which imports this file
BAND = (0.3, 0.8)  # of eager's peak: where people have only "checkpoint the first m blocks"


def _mebibytes(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**20:.2f}"


def _number(value: float | None, form: str = ".3f") -> str:
    return "" if value is None else format(value, form)


def _yes(value: bool | None) -> str:
    return "" if value is None else ("yes" if value else "**no**")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(header: list[str], lines: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *("| " + " | ".join(map(_cell, line)) + " |" for line in lines)]


def _rivals(rows: list[Row]) -> list[str]:
    header = [
        "", "peak MiB", "/ eager", "kept within its share", "extra FLOPs", "time / eager", "gradients equal",
        "packhorse at its peak: MiB", "extra FLOPs", "time / eager", "time / it",
    ]  # fmt: skip
    lines = []
    for row in rows:
        if row.failure:
            lines.append([row.name, row.failure, *[""] * (len(header) - 2)])
            continue
        own = [
            row.name,
            _mebibytes(row.peak_bytes),
            _number(row.over_eager),
            _yes(row.held),
            _number(row.extra_flops),
            _number(row.time),
            row.equal or "",
        ]
        there = "none fits" if row.at_peak_failure else _mebibytes(row.at_peak_bytes)
        lines.append([*own, there, *map(_number, (row.at_peak_flops, row.at_peak_time, row.at_peak_ratio))])
    return _table(header, lines)


def _ours(rows: list[Row]) -> list[str]:
    header = [
        "", "budget of the whole step, MiB", "held", "predicted = measured", "peak MiB", "/ eager", "extra FLOPs", "time / eager", "gradients equal",
    ]  # fmt: skip
    lines = []
    for row in rows:
        if row.failure:
            lines.append([row.name, _mebibytes(row.budget_bytes), row.failure, *[""] * (len(header) - 3)])
            continue
        promises = [row.name, _mebibytes(row.budget_bytes), _yes(row.held), _yes(row.exact)]
        lines.append([*promises, _mebibytes(row.peak_bytes), *map(_number, (row.over_eager, row.extra_flops, row.time)), row.equal or ""])
    return _table(header, lines)


def least_of(rows: list[Row]) -> dict[str, Row]:
    """family -> its row of the least peak, least first."""
    ran = sorted((row for row in rows if row.peak_bytes is not None), key=lambda row: row.peak_bytes)
    found: dict[str, Row] = {}
    for row in ran:
        found.setdefault(row.family, row)
    return found


def sentences(rows: list[Row]) -> list[str]:
    """What the tables come to: who needs the least, who is slower at the same peak, and who kept within what it was given."""
    said = []
    met = [row for row in rows if row.at_peak_ratio is not None and row.family != "eager"]
    ran = [row for row in rows if not row.ours and row.peak_bytes is not None and row.family != "eager"]
    if met:
        slower, worst = [row for row in met if row.at_peak_ratio > 1], max(met, key=lambda row: row.at_peak_ratio)
        said.append(
            f"Within the peak of each of {len(ran)} rivals packhorse has a plan for {len(met)}, and is no slower in {len(met) - len(slower)}; "
            f"the largest ratio of times is {worst.at_peak_ratio:.3f}, against {worst.name}."
        )
    everything = [row.time for row in rows if row.name == "packhorse, none" and row.time is not None]
    for row in (row for row in met if row.family == "first m blocks" and BAND[0] <= row.over_eager <= BAND[1]):
        own = f", {row.at_peak_time / everything[0] - 1:+.1%} of its own without recomputation" if everything else ""
        said.append(
            f"{row.name} ({row.over_eager:.2f} of eager's peak): {row.time - 1:+.1%} of eager's time; packhorse there "
            f"{row.at_peak_time - 1:+.1%} of eager's{own}."
        )
    asked = [row for row in rows if not row.ours and row.held is not None]
    if asked:
        said.append(f"activation_memory_budget kept the peak within its share in {sum(row.held for row in asked)} of {len(asked)} cases.")
    budgets = [row for row in rows if row.ours and row.held is not None]
    if budgets:
        said.append(f"packhorse kept its budget in {sum(row.held for row in budgets)} of {len(budgets)} cases.")
    return said


def render(rows: list[Row], title: str, threads: int, rounds: int) -> str:
    """The tables and what they come to, as Markdown."""
    theirs, ours = [row for row in rows if not row.ours], [row for row in rows if row.ours]
    least = [[family, row.name, _mebibytes(row.peak_bytes), _number(row.over_eager), _number(row.time)] for family, row in least_of(rows).items()]
    return "\n".join(
        [
            f"{title[0].upper()}{title[1:]}; {threads} thread(s), median of {rounds} interleaved rounds.",
            "",
            *sentences(rows),
            "",
            *_rivals(theirs),
            "",
            *_ours(ours),
            "",
            *_table(["family", "its least peak", "MiB", "/ eager", "time / eager"], least),
        ]
    )


# What is one colour in the picture; it has eight.
_TOGETHER = {
    "checkpoint every k": "checkpoint every k, nested",
    "nested": "checkpoint every k, nested",
    "activation_memory_budget, aot_eager": "torch.compile, with a budget or without",
    "activation_memory_budget, inductor": "torch.compile, with a budget or without",
    "torch.compile": "torch.compile, with a budget or without",
    "packhorse": "packhorse optimal",
    "packhorse optimal": "packhorse optimal",
}


def picture(rows: list[Row], title: str) -> str:
    """Peak over eager's against time over eager's, points of a colour a family, as SVG. Eager itself is (1, 1)."""
    series: dict[str, list[tuple[float, float]]] = {"packhorse optimal": []}
    for row in rows:
        if row.over_eager is not None and row.time is not None and row.family != "eager":
            colour = _TOGETHER.get(row.family, "packhorse, other methods" if row.ours else row.family)
            series.setdefault(colour, []).append((row.over_eager, row.time))
    return line_chart(
        {name: points for name, points in series.items() if points},
        x_label="peak of intermediates / eager's",
        y_label="CPU time of a step / eager's",
        log_x=True,
        title=title,
        lines=False,
    )
