"""The loss of a run as a curve in the terminal: training loss averaged over short stretches, and validation loss."""

from collections.abc import Sequence

import plotext

from packhorse.train.metrics import Record

_LEAST_WIDTH = 40
_MOST_WIDTH = 100
_HEIGHT = 18
_NUM_STEPS_SHOWN = 4


def plot_losses(records: Sequence[Record], width: int, unit: str = "byte") -> str:
    """Records of metrics.jsonl -> a plot of loss (nats/unit) over steps, at most `width` columns wide.

    Below 40 columns, or with fewer than two points, the same in one line each: the first and the last losses.
    """
    training = [(record["step"], record["loss"]) for record in records if record["kind"] == "step"]
    validation = [(record["step"], record["loss"]) for record in records if record["kind"] == "eval"]
    if width < _LEAST_WIDTH or len(training) < 2:
        return "\n".join(_in_words(name, points) for name, points in (("training", training), ("validation", validation)) if points)
    columns = min(width, _MOST_WIDTH)
    figure = plotext.figure.clear()  # the library keeps one figure for the whole process
    figure.plot_size(columns, _HEIGHT)
    figure.draw(figure.signal(*zip(*_averaged(training, columns), strict=True), marker="braille").lines())
    if validation:
        figure.draw(figure.signal(*zip(*validation, strict=True), marker="●"))
    figure.title(f"loss, nats/{unit}: ⠒ training ● validation")
    first, last = training[0][0], training[-1][0]
    ticks = sorted({first + (last - first) * part // _NUM_STEPS_SHOWN for part in range(_NUM_STEPS_SHOWN + 1)})
    figure.ruler("x").ticks(ticks, [str(step) for step in ticks])
    return figure.build().string(colorless=True)


def _averaged(points: Sequence[tuple[int, float]], num_stretches: int) -> list[tuple[float, float]]:
    """Means of at most `num_stretches` runs of neighbouring points: a step's loss is noisy, and a column shows one value."""
    size = -(-len(points) // num_stretches)
    stretches = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(step for step, _ in part) / len(part), sum(loss for _, loss in part) / len(part)) for part in stretches]


def _in_words(name: str, points: Sequence[tuple[int, float]]) -> str:
    (first, high), (last, low) = points[0], points[-1]
    return f"{name} loss: {high:.3f} at step {first}, {low:.3f} at step {last}"
