"""What the paper says, beside what was found. Each claim is a line of a table: the paper's words, our figure, and whether it holds."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import log2

from packhorse.reproduce.curves import PAPER_BYTES, WITHIN_7_GB, Point, at, in_gigabytes
from packhorse.reproduce.fit import fit
from packhorse.reproduce.smaller import Run

FULL_DEPTH = 1024
FULL_LENGTH = 2048


@dataclass(frozen=True)
class Claim:
    """what, the paper's figure, ours, and whether ours holds (None: shown beside, nothing is asked)."""

    what: str
    paper: str
    ours: str
    holds: bool | None


def claims(resnet: list[Point], lstm: list[Point], runs: dict[str, list[Run]]) -> list[Claim]:
    """All that the figures can answer. runs: net -> its plans, run for real."""
    found = [*_of_resnet(resnet), *_of_lstm(lstm)]
    found += [claim for name, points in (("ResNet", resnet), ("LSTM", lstm)) for claim in _of_growth(name, points)]
    return [*found, *(claim for name, mine in runs.items() for claim in _of_runs(name, mine))]


def _of_resnet(points: list[Point]) -> Iterator[Claim]:
    depth = max(point.size for point in points)
    none, shared, sublinear = (at(points, curve, depth) for curve in ("none", "sharing", "sublinear"))
    assert none and shared and sublinear
    where = f"ResNet, {depth} layers"
    ratio = none.feature_bytes / shared.feature_bytes
    yield Claim(f"{where}: none over in-place and sharing", "2 to 3 times", f"{ratio:.2f} times", 2 <= ratio <= 3)
    if depth == FULL_DEPTH:
        yield Claim(f"{where}: before recomputation", "48 GB", f"{_gb(none)} (none), {_gb(shared)} (sharing)", None)
        yield Claim(f"{where}: sublinear", "less than 7 GB", _gb(sublinear), sublinear.feature_bytes < PAPER_BYTES)
    yield _one_forward(where, sublinear)
    same = at(points, "optimal", depth)
    if same is None:
        yield Claim(f"{where}: optimal in sublinear's bytes", "", "no plan was found", False)
    else:
        assert same.least_extra is not None
        text = f"{same.extra:.1%} longer, sublinear {sublinear.extra:.1%}; no plan can do below {same.least_extra:.1%}"
        yield Claim(f"{where}: optimal in sublinear's bytes ({_gb(sublinear)})", "", text, same.extra <= sublinear.extra)
    within = at(points, WITHIN_7_GB, depth)
    if within is not None:
        holds = within.extra <= 0.2 and within.feature_bytes <= PAPER_BYTES
        yield Claim(f"{where}: optimal within 7 GB", "at most 20 % (our aim)", f"{within.extra:.1%} longer in {_gb(within)}", holds)


def _of_lstm(points: list[Point]) -> Iterator[Claim]:
    length = max(point.size for point in points)
    shared, sublinear = (at(points, curve, length) for curve in ("sharing", "sublinear"))
    assert shared and sublinear
    where = f"LSTM, {length} time steps"
    ratio = shared.feature_bytes / sublinear.feature_bytes
    yield Claim(f"{where}: sharing over sublinear", "more than 4 times", f"{ratio:.1f} times", ratio > 4 if length == FULL_LENGTH else None)
    yield _one_forward(where, sublinear)


def _one_forward(where: str, point: Point) -> Claim:
    text = f"{point.extra:.1%} longer, a forward pass is {point.forward:.1%}"
    return Claim(f"{where}: time of sublinear", "one more forward pass, 30 % measured", text, point.extra <= point.forward)


def _of_growth(name: str, points: list[Point]) -> Iterator[Claim]:
    line = [(point.size, point.feature_bytes / 1e6) for point in points if point.curve == "recursive"]
    if len(line) < 3:
        return
    by_log, straight = fit(line, log2), fit(line, float)
    text = f"{by_log.a:.0f} MB + {by_log.b:.1f} MB log2 n, R2 = {by_log.r2:.3f} (a + b n: {straight.r2:.3f})"
    yield Claim(f"{name}: recursive", "grows with log n", text, by_log.r2 >= 0.9 and by_log.r2 >= straight.r2)


def _of_runs(name: str, runs: list[Run]) -> Iterator[Claim]:
    exact = sum(run.predicted_bytes == run.measured_bytes for run in runs)
    yield Claim(f"{name}, run here: peak bytes as predicted", "", f"{exact} of {len(runs)} plans", exact == len(runs))
    equal = sum(run.losses == runs[0].losses for run in runs)
    yield Claim(f"{name}, run here: losses equal bit for bit", "", f"{equal} of {len(runs)} plans", equal == len(runs))
    found = {run.curve: run for run in runs}
    ratio = found["none"].measured_feature_bytes / found["sublinear"].measured_feature_bytes
    yield Claim(f"{name}, run here: none over sublinear", "", f"{ratio:.1f} times, measured", None)


def _gb(point: Point) -> str:
    return f"{in_gigabytes(point.feature_bytes):.2f} GB"
