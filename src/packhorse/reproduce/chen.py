"""`packhorse reproduce chen`: the memory figures of Chen et al. 2016 (arXiv:1604.06174, figures 5 and 6), planned at the paper's sizes and
run at smaller ones.

A residual net over its depth and an LSTM over its length, each planned without optimization, in place, with shared memory, dropping what is cheap,
by the sublinear plan, and by packhorse's own plans. Bytes are feature maps as the paper counts them: all that a forward and backward pass
makes, without weights,
their gradients and the batch. GB = 1e9 bytes. Seconds are predicted from the packaged device file, or measured where it says so.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from packhorse.bench.step import write_between
from packhorse.device.device import load_device
from packhorse.errors import UserError
from packhorse.report.chart import line_chart
from packhorse.reproduce.claims import FULL_DEPTH, FULL_LENGTH, Claim, claims
from packhorse.reproduce.curves import CURVES, MORE, Point, at, captured, in_gigabytes, points
from packhorse.reproduce.smaller import BASE, Run, run_all
from packhorse.reproduce.workloads import Workload, lstm_of, resnet_of, small_lstm, small_resnet

BEGIN, END = "<!-- reproduce chen: begin -->", "<!-- reproduce chen: end -->"
DEPTHS, LENGTHS = (128, 256, 512, FULL_DEPTH), (64, 128, 256, 512, 1024, FULL_LENGTH)
QUICK_DEPTHS, QUICK_LENGTHS = (16, 32, 64), (24, 32, 64)
SMALL_DEPTH, SMALL_LENGTH = 64, 64


def measure(workload: Workload) -> list[Point]:
    """All points of one net, told on stderr as they come."""
    device, found = load_device(), []
    for size in workload.sizes:
        _say(f"{workload.name} {size}: capturing")
        graph, persistent = captured(workload, size)
        curves = CURVES | (MORE if workload.name == "resnet" and size == FULL_DEPTH else {})
        for point in points(graph, persistent, device, size, curves):
            found.append(point)
            _say(f"{workload.name} {size}, {point.curve}: {in_gigabytes(point.feature_bytes):.3f} GB, planned in {point.planning_s:.1f} s")
    return found


def table(workload: Workload, found: list[Point]) -> str:
    """Two Markdown tables: gigabytes, and extra time."""
    heads = f"| {workload.axis} | " + " | ".join(CURVES) + " |\n|" + "---|" * (len(CURVES) + 1)

    def rows(cell) -> list[str]:
        lines = []
        for size in workload.sizes:
            cells = [at(found, curve, size) for curve in CURVES]
            lines.append(f"| {size} | " + " | ".join("" if point is None else cell(point) for point in cells) + " |")
        return lines

    gigabytes = rows(lambda point: f"{in_gigabytes(point.feature_bytes):.3f}")
    extra = rows(lambda point: f"{100 * point.extra:.1f}")
    note = "Seconds that a step takes longer than one that computes nothing again, in %, predicted:"
    return "\n".join([f"**{workload.title}**, feature maps in GB:", "", heads, *gigabytes, "", note, "", heads, *extra])


def table_of_runs(workload: Workload, runs: list[Run]) -> str:
    """A Markdown table of what was run."""
    lines = [
        f"**{workload.title}, {workload.sizes[0]} {workload.axis}**, run for real; time of a step over that of {BASE!r}:",
        "",
        "| curve | method | peak, predicted | measured | feature maps, predicted | measured | time, predicted | measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.curve} | {r.method} | {r.predicted_bytes:,} | {r.measured_bytes:,} | {r.feature_bytes:,} | {r.measured_feature_bytes:,} "
        f"| {r.predicted_time:.2f} | {r.measured_time:.2f} |"
        for r in runs
    ]
    return "\n".join(lines)


def table_of_claims(found: Sequence[Claim]) -> str:
    """A Markdown table: paper, ours, whether it holds."""
    words = {True: "yes", False: "**no**", None: ""}
    rows = [f"| {claim.what} | {claim.paper} | {claim.ours} | {words[claim.holds]} |" for claim in found]
    return "\n".join(["| | paper | here | holds |", "|---|---|---|---|", *rows])


def picture(workload: Workload, found: list[Point]) -> str:
    """The figure as SVG: gigabytes over the size, both on logarithmic axes as in the paper."""
    lines = {curve: [(p.size, in_gigabytes(p.feature_bytes)) for p in found if p.curve == curve] for curve in CURVES}
    drawn = {curve: line for curve, line in lines.items() if line}
    net = "ResNet" if workload.name == "resnet" else "LSTM"
    return line_chart(drawn, x_label=workload.axis, y_label="feature maps, GB", log_x=True, log_y=True, title=f"{net}: memory of a training step")


def run(arguments: list[str], *, as_json: bool) -> int:
    """The command. Exit code 0 if every claim holds, else 1."""
    parser = argparse.ArgumentParser(prog="packhorse reproduce chen", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--depths", type=int, nargs="+", metavar="N", help=f"layers of the ResNets (default {' '.join(map(str, DEPTHS))})")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="N", help=f"time steps of the LSTMs (default {' '.join(map(str, LENGTHS))})")
    parser.add_argument("--rounds", type=int, default=5, help="steps that are timed of each plan that is run")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="Markdown file whose tables are replaced; the figures go beside it")
    parser.add_argument("--picture", type=Path, metavar="FOLDER", help="folder for the two figures as SVG")
    asked = parser.parse_args(arguments)
    if asked.rounds < 1:
        raise UserError(f"reproduce chen: --rounds {asked.rounds}: expected 1 or more")
    if asked.write:
        write_between(asked.write, BEGIN, END, None)  # a file that cannot take the tables is said before the work
    if asked.picture and not asked.picture.is_dir():
        raise UserError(f"reproduce chen: --picture {asked.picture}: there is no such folder; make it, or name another")
    torch.set_num_threads(1)
    depths = tuple(asked.depths or (QUICK_DEPTHS if asked.quick else DEPTHS))
    lengths = tuple(asked.lengths or (QUICK_LENGTHS if asked.quick else LENGTHS))
    nets = [resnet_of(depths), lstm_of(lengths)]
    small = [small_resnet(SMALL_DEPTH // 4), small_lstm(SMALL_LENGTH // 4)] if asked.quick else [small_resnet(SMALL_DEPTH), small_lstm(SMALL_LENGTH)]
    runs = []
    for workload in small:
        _say(f"{workload.name} {workload.sizes[0]}: running every plan for real")
        runs.append(run_all(workload, workload.sizes[0], asked.rounds))
    found = [measure(workload) for workload in nets]
    said = claims(found[0], found[1], {"ResNet": runs[0], "LSTM": runs[1]})
    parts = [table_of_claims(said), *(table(w, f) for w, f in zip(nets, found)), *(table_of_runs(w, r) for w, r in zip(small, runs))]
    text = "\n\n".join(parts)
    if as_json:
        figures = {w.name: [asdict(point) for point in f] for w, f in zip(nets, found)}
        ran = {w.name: [asdict(r) for r in mine] for w, mine in zip(small, runs)}
        print(json.dumps({"claims": [asdict(claim) for claim in said], "points": figures, "runs": ran}))
    else:
        print(text)
    for folder in (asked.picture, asked.write and asked.write.parent):
        for workload, f in zip(nets, found):
            if folder is not None:
                (folder / f"chen-{workload.name}.svg").write_text(picture(workload, f))
    if asked.write:
        write_between(asked.write, BEGIN, END, text)
    return int(any(claim.holds is False for claim in said))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
