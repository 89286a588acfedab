"""A line chart as one SVG: several named series, linear or logarithmic axes, light and dark. No torch, no script, no dependency."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from math import ceil, floor, hypot, log10

from packhorse.errors import UserError

WIDTH, HEIGHT = 760, 440
LEFT, TOP, BOTTOM = 76, 44, 56
_CHARACTER = 6.6  # widest average of a character at 12 px: the legend's width is worked out before anything is drawn
# colours that stay apart for the colour-blind (Okabe & Ito 2008, darkened), and a dash each, so that none rests on colour alone
_LIGHT = ("#0b62b5", "#c4500c", "#00795a", "#9a3f86", "#8a6b00", "#3b3f46", "#1f93c9", "#b3123f")
_DARK = ("#6cb2f7", "#f59a5b", "#3fcfa2", "#dd8fca", "#dcc04a", "#c3c8d0", "#8ed7fb", "#f2799a")
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "14 4", "4 2", "1 4", "11 3 2 3 2 3")


def line_chart(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    title: str = "",
    lines: bool = True,
) -> str:
    """The chart of `series` (name -> points (x, y), drawn in the order given) as an `<svg>` string, to save as a file or to put into a page.

    lines=False draws the points alone.

    Every point carries its figures as a tooltip; all text is escaped. More than eight series begin the colours again.
    Raises UserError if there is no point, if a figure is not finite, or if one is not above zero on a logarithmic axis.
    """
    points = [point for line in series.values() for point in line]
    _check(points, log_x, log_y, title)
    legend = round(max(len(name) for name in series) * _CHARACTER) + 52
    right = WIDTH - legend - 16
    xs = _Axis([x for x, _ in points], log_x, LEFT, right)
    ys = _Axis([y for _, y in points] + ([] if log_y else [0.0]), log_y, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="line-chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title or y_label)}">',
        f"<style>{_style(len(series))}</style>",
        f'<text class="title" x="{LEFT}" y="22">{escape(title)}</text>' if title else "",
    ]
    for x in xs.ticks:
        at = f"{xs.at(x):.1f}"
        parts.append(
            f'<path class="grid" d="M{at} {TOP}V{HEIGHT - BOTTOM}"/><text x="{at}" y="{HEIGHT - BOTTOM + 18}" class="middle">{_figure(x)}</text>'
        )
    for y in ys.ticks:
        at = f"{ys.at(y):.1f}"
        parts.append(f'<path class="grid" d="M{LEFT} {at}H{right}"/><text x="{LEFT - 8}" y="{at}" dy="4" class="end">{_figure(y)}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{right}"/>')
    parts.append(f'<text class="middle" x="{(LEFT + right) / 2:.1f}" y="{HEIGHT - 14}">{escape(x_label)}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text class="middle" transform="translate(18 {middle:.1f}) rotate(-90)">{escape(y_label)}</text>')
    for index, (name, line) in enumerate(series.items()):
        kind = f"s{index % len(_LIGHT)}"
        places = [(xs.at(x), ys.at(y)) for x, y in line]
        path = " ".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(places))
        parts.append(f'<g class="{kind}">' + (f'<path class="line" d="{path}"/>' if lines else ""))
        for (x, y), (px, py) in zip(line, places):
            parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3"><title>{escape(name)}: {_figure(x)}, {_figure(y)}</title></circle>')
        height = TOP + 10 + 20 * index
        parts.append(
            (f'<path class="line" d="M{right + 16} {height}h28"/>' if lines else "") + f'<circle cx="{right + 30}" cy="{height}" r="3"/>'
            f'<text x="{right + 50}" y="{height + 4}">{escape(name)}</text></g>'
        )
    return "".join([*parts, "</svg>"])


class _Axis:
    """A scale: `at(value)` in pixels from `begin` to `end`, and the ticks inside it."""

    def __init__(self, values: list[float], log: bool, begin: float, end: float):
        low, high = min(values), max(values)
        if log:
            scaled = (log10(low), log10(high))
            if low == high:
                scaled = (scaled[0] - 0.5, scaled[1] + 0.5)
            room = (scaled[1] - scaled[0]) * 0.04
            self.low, self.high = scaled[0] - room, scaled[1] + room
            self.ticks = _log_ticks(values, self.low, self.high)
        else:
            step = _nice_step((high - low) or abs(high) or 1.0, 6)
            self.low, self.high = floor(low / step) * step, ceil(high / step) * step
            if self.low == self.high:
                self.high += step
            self.ticks = [self.low + step * i for i in range(round((self.high - self.low) / step) + 1)]
        self.log, self.begin, self.end = log, begin, end

    def at(self, value: float) -> float:
        scaled = log10(value) if self.log else value
        return self.begin + (scaled - self.low) / (self.high - self.low) * (self.end - self.begin)


def _check(points: list[tuple[float, float]], log_x: bool, log_y: bool, title: str) -> None:
    chart = f"the chart {title!r}" if title else "the chart"
    if not points:
        raise UserError(f"{chart} has no point to draw; give at least one series with one point")
    for x, y in points:
        if not hypot(x, y) < float("inf"):
            raise UserError(f"{chart} has the point ({x}, {y}), expected finite numbers")
        if (log_x and x <= 0) or (log_y and y <= 0):
            raise UserError(
                f"{chart} has the point ({x}, {y}), expected numbers above zero on a logarithmic axis; leave it out or take a linear axis"
            )


def _nice_step(span: float, most: int) -> float:
    """The least of 1, 2, 5 times a power of ten that divides the span into at most so many parts."""
    power = 10.0 ** floor(log10(span / most))
    return next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= most)


def _log_ticks(values: Iterable[float], low: float, high: float) -> list[float]:
    """The values themselves if they are few and stand apart (128, 256, 512, ...), else 1, 2 and 5 of each decade, else whole decades."""
    distinct = sorted(set(values))
    gaps = [log10(b) - log10(a) for a, b in pairwise(distinct)]
    if len(distinct) <= 9 and min(gaps, default=1.0) > (high - low) / 14:
        return distinct
    for factors in ((1, 2, 5), (1,)):
        ticks = [f * 10.0**e for e in range(floor(low), ceil(high) + 1) for f in factors if low <= log10(f * 10.0**e) <= high]
        if 2 <= len(ticks) <= 10:
            break
    return ticks


def _figure(value: float) -> str:
    """A number for people: 12800, 0.25, 3.2e+09."""
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"


def _style(count: int) -> str:
    """Scoped by the class of the chart, as the styles of an SVG in a page hold for the whole page."""

    def colours(palette: tuple[str, ...]) -> str:
        used = list(enumerate(palette))[:count]
        return "".join(f".line-chart .s{i} .line{{stroke:{c}}}.line-chart .s{i} circle{{fill:{c}}}" for i, c in used)

    dashes = "".join(f".line-chart .s{i} .line{{stroke-dasharray:{d}}}" for i, d in list(enumerate(_DASHES))[:count] if d)
    return (
        ".line-chart{font:12px system-ui,sans-serif;max-width:100%;height:auto}"
        ".line-chart text{fill:#2b2f36}.line-chart .title{font-size:15px;font-weight:600}"
        ".line-chart .middle{text-anchor:middle}.line-chart .end{text-anchor:end}"
        ".line-chart .grid{stroke:#8b93a1;stroke-opacity:.25;fill:none}.line-chart .axis{stroke:#8b93a1;fill:none}"
        f".line-chart .line{{fill:none;stroke-width:2}}{dashes}{colours(_LIGHT)}"
        f"@media(prefers-color-scheme:dark){{.line-chart text{{fill:#dfe3ea}}{colours(_DARK)}}}"
    )
