"""`packhorse bench residency`: where saved values wait, decided together, beside each way alone, under the same budget.

24 cells: {GPT, BERT, Hugging Face Llama} x 4 budgets x {one rank, two dp ranks at stage 3 of ZeRO}. Four plans in each:

  recompute only     what is computed again, by the exact method; nothing leaves
  offload only       nothing is computed again; saved values wait on the host
  ZeRO-3 and blocks  every block is computed again from its input (on one rank without ZeRO)
  joint              the planner decides for every value

The host holds at most 30 % of what is saved when everything is kept, where it is used at all. Budgets lie between the step that keeps everything and
the least that recomputation alone can do: of the room between the two a half, a quarter, an eighth, a sixteenth. The link to the host has a quarter
of the rate at which the copy of all that is saved takes as long as the forward pass's products:

  rate = saved bytes / (4 x seconds of the forward pass's products, convolutions and attention, as the device file has them)

Of each cell: whether peak, bytes on the host and bytes sent were those of the plan, on every rank in every step; whether losses and gradients have
the bits of the step that keeps everything; the predicted seconds, and the measured ones: all four run in turns in one job. Words after `residency`
pick models by a part of their name.
"""

import argparse
import json
import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from math import comb
from pathlib import Path

import torch

import packhorse
from packhorse.bench.jobs import run_job
from packhorse.bench.residency_job import HOST_BUDGET, JOINT, LAYERS, SAMPLES, WAYS, WORKLOADS, Cell, Ran, batch_of
from packhorse.bench.step import write_between
from packhorse.device.device import Device, format_device, load_device
from packhorse.device.links import Link
from packhorse.errors import UserError
from packhorse.graph.ir import Graph
from packhorse.planning.flops import node_flops
from packhorse.planning.residency import saved_bytes

JOB, SECONDS = "packhorse.bench.residency_job", 3600
BEGIN, END = "<!-- bench residency: begin -->", "<!-- bench residency: end -->"
ROOMS = (1 / 2, 1 / 4, 1 / 8, 1 / 16)
RANKS = (1, 2)
SHARE, COPY_S = 1 / 4, 1e-5  # of the balanced rate; seconds of a copy of nothing
FASTER = 1.1  # times as fast: "10 % faster"
SURE = 0.95
SAME = 1 + 1e-12  # predicted seconds are sums of floats


def balanced_rate(graph: Graph, device: Device) -> float:
    """Bytes a second at which copying all that is saved takes as long as the forward pass's products. graph: of a step that keeps everything."""
    products = [node for node in graph.nodes if node.phase == "forward" and node_flops(node, graph.values)]
    return saved_bytes(graph) / sum(device.seconds(node, graph.values) for node in products)


def slow_device(model: str, layers: int, samples: int, device: Device) -> Device:
    """The device with a link to the host of a quarter of the model's balanced rate."""
    with torch.device("meta"):
        net = WORKLOADS[model](layers).train()
    batch = {name: tensor.to("meta") for name, tensor in batch_of(model, samples, 0).items()}
    plan = packhorse.plan(net, batch, optimizer=torch.optim.AdamW(net.parameters(), fused=True), recompute="none")
    rate = float(f"{SHARE * balanced_rate(plan.programs['first'].graph, device):.4g}")
    return replace(device, name=f"{device.name}, slow host link for {model}", host_link=Link(COPY_S, rate))


# -- judging -----------------------------------------------------------------------------------------------------------------------------


def joint(cell: Cell) -> Ran:
    """The plan in which everything is decided together."""
    return next(ran for ran in cell.rans if ran.way == JOINT)


def others(cell: Cell) -> list[Ran]:
    """The other ways that fit."""
    return [ran for ran in cell.rans if ran.way != JOINT and ran.fits]


def predicted_gain(cell: Cell) -> float:
    """How many times as fast the joint plan is as the best of the others, predicted."""
    return min(ran.predicted_s for ran in others(cell)) / joint(cell).predicted_s


def measured_gains(cell: Cell, of: Callable[[Ran], list[float]] = lambda ran: ran.seconds) -> list[float]:
    """The same measured, in each round, against the way with the least median."""
    best = min(others(cell), key=lambda ran: statistics.median(of(ran)))
    return [theirs / ours for theirs, ours in zip(of(best), of(joint(cell)), strict=True)]


def cpu_gain(cell: Cell) -> float:
    """The same of CPU seconds, the median of all rounds. What a plan waits for is not in it."""
    return statistics.median(measured_gains(cell, lambda ran: ran.cpu_seconds))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Bounds that hold the median of what the values are drawn from with a probability of at least 95 %, whatever it is: the k-th value from either
    end, by how often a fair coin falls the same way."""
    found, n = sorted(values), len(values)
    k, tail = 0, 1 / 2**n
    while k + 1 < n - k - 1 and 2 * (tail + comb(n, k + 1) / 2**n) <= 1 - SURE:
        k += 1
        tail += comb(n, k) / 2**n
    return found[k], found[n - 1 - k]


def is_kept(cell: Cell) -> bool:
    """Every plan of the cell held its budget, was exact and has the bits of keeping everything."""
    ran = [ran for ran in cell.rans if ran.fits]
    return all(r.exact and r.equal and r.peak_bytes <= cell.budget_bytes for r in ran) and joint(cell).fits


def is_slower(cell: Cell) -> bool:
    """Measured: slower than the best of the others, and no chance of it. The very same program is never slower."""
    return not joint(cell).same_as and interval(measured_gains(cell))[1] < 1


def is_never_slower_predicted(cell: Cell) -> bool:
    """By the planner's own seconds."""
    return predicted_gain(cell) * SAME >= 1


# -- the table ---------------------------------------------------------------------------------------------------------------------------


def render(cells: list[Cell], devices: dict[str, Device]) -> str:
    """A summary and a table in Markdown."""
    kept, n = sum(map(is_kept, cells)), len(cells)
    there = [cell for cell in cells if joint(cell).fits and others(cell)]
    never, faster = sum(map(is_never_slower_predicted, there)), sum(predicted_gain(c) >= FASTER for c in there)
    slower, measured = [c for c in there if is_slower(c)], sum(statistics.median(measured_gains(c)) >= FASTER for c in there)
    links = ", ".join(f"{model} {device.host_link.bytes_per_s / 1e6:.0f} MB/s" for model, device in devices.items() if device.host_link)
    rounds = len(joint(cells[0]).seconds)
    lines = [
        f"Link to the host, a quarter of the balanced rate: {links}. Bytes there: up to {HOST_BUDGET} of what is saved.",
        "",
        f"- {kept} of {n} cells: within budget, peak, bytes on the host and bytes sent as planned, bits equal, for every plan.",
        f"- Predicted: the joint plan is never slower than the best of the others in {never} of {n} cells, and at least 10 % faster in {faster}.",
        f"- Measured: it is slower in {len(slower)} of {n} cells beyond chance, and at least 10 % faster (median) in {measured}.",
        "",
        "Seconds are predicted / measured (median of "
        f"{rounds} rounds in which all take turns). Gain: over the best of the others, predicted; measured, the median of the rounds' ratios and the "
        "interval that holds the true median at 95 % (slower beyond chance: all of it is below 1); and of CPU seconds, which other work on the "
        "machine changes least and which leave out what is waited for.",
        "",
        "| model | dp | room | budget MiB | keep everything MiB, s | "
        + " | ".join(WAYS)
        + " | host MiB | gain, predicted | measured | CPU seconds |",
        "|---" * (9 + len(WAYS)) + "|",
    ]
    return "\n".join([*lines, *map(_row, cells)])


def _row(cell: Cell) -> str:
    mine = joint(cell)
    gains = measured_gains(cell) if mine.fits and others(cell) else []
    low, high = interval(gains) if gains else (0.0, 0.0)
    figures = [
        cell.model,
        str(cell.dp),
        f"1/{round(1 / cell.room)}",
        f"{cell.budget_bytes / 2**20:.1f}",
        f"{cell.everything_bytes / 2**20:.1f}, {cell.everything_s:.3f}",
        *(_seconds(ran) for ran in cell.rans),
        f"{mine.host_bytes / 2**20:.1f}",
        f"{predicted_gain(cell):.3f}" if gains else "",
        f"{statistics.median(gains):.2f} ({low:.2f} to {high:.2f})" if gains else "",
        f"{cpu_gain(cell):.2f}" if gains else "",
    ]
    broken = "" if is_kept(cell) else " (not as promised)"
    return "| " + " | ".join(figures) + broken + " |"


def _seconds(ran: Ran) -> str:
    return f"{ran.predicted_s:.3f} / {statistics.median(ran.seconds):.3f}" if ran.fits else "does not fit"


# -- the command -------------------------------------------------------------------------------------------------------------------------


def run(arguments: list[str], *, as_json: bool) -> int:
    """The command. Exit code 0 if every plan kept its word and the joint plan is never slower, predicted and (beyond chance) measured."""
    parser = argparse.ArgumentParser(prog="packhorse bench residency", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of models' names; all without any")
    parser.add_argument("--rounds", type=int, default=9, help="measured steps of each plan (default 9)")
    parser.add_argument("--ranks", type=int, choices=RANKS, help="only the mesh of so many ranks")
    parser.add_argument("--rooms", type=float, nargs="+", default=list(ROOMS), metavar="SHARE", help="budgets, as shares of the room")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of a rank")
    parser.add_argument("--device", help="device file of this machine, as `packhorse calibrate --write` makes it (default: the packaged CPU)")
    parser.add_argument("--write", type=Path, help="Markdown file whose table is replaced")
    asked = parser.parse_args(arguments)
    machine = load_device(asked.device)
    for name in asked.names:
        if not any(name.lower() in model.lower() for model in WORKLOADS):
            raise UserError(f"bench residency: no model is called {name}; the models are {', '.join(WORKLOADS)}")
    if asked.rounds < 1 or asked.layers < 1 or asked.samples < 1 or not all(0 < room <= 1 for room in asked.rooms):
        raise UserError(
            f"bench residency: --rounds {asked.rounds} --layers {asked.layers} --samples {asked.samples} --rooms {asked.rooms}: expected 1 or more "
            "of each, and shares above 0 and at most 1"
        )
    if asked.write:
        write_between(asked.write, BEGIN, END, None)  # a file that cannot take the table is said before the work
    models = [model for model in WORKLOADS if not asked.names or any(name.lower() in model.lower() for name in asked.names)]
    cells: list[Cell] = []
    devices: dict[str, Device] = {}
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        for model in models:
            devices[model] = device = slow_device(model, asked.layers, asked.samples, machine)
            file = Path(folder) / f"{model}.toml"
            file.write_text(format_device(device), encoding="utf-8")
            given = {"model": model, "layers": asked.layers, "samples": asked.samples, "device": str(file)}
            for ranks in [asked.ranks] if asked.ranks else RANKS:
                found = run_job(JOB, given | {"rooms": asked.rooms, "rounds": asked.rounds}, ranks, seconds=SECONDS)
                cells += [Cell(**fields | {"rans": [Ran(**ran) for ran in fields["rans"]]}) for fields in found]
                if not as_json:
                    print("\n".join(map(_row, cells[-len(asked.rooms) :])), flush=True)
    text = render(cells, devices)
    print(json.dumps({"cells": [asdict(cell) for cell in cells]}) if as_json else "\n" + text)
    if asked.write:
        write_between(asked.write, BEGIN, END, text)
    good = all(is_kept(c) and (not others(c) or (is_never_slower_predicted(c) and not is_slower(c))) for c in cells)
    return int(not good)
