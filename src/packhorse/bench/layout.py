"""How near layouts come to the lower bound: the buffers of CSV files, and a made-up training step whose best height is known."""

import argparse
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from packhorse.errors import UserError
from packhorse.memory.buffers import Buffer
from packhorse.memory.instances import read_csv
from packhorse.memory.layout import greedy_layout, lay_out

FORWARD_SAVED, FORWARD_TEMPORARY, BACKWARD_TEMPORARY = 8, 12, 30  # buffers of one block; 50 in all
STEP_ALIGNMENT = 64


def measure(folder: Path | None, time_limit_s: float, num_workers: int) -> list[dict[str, Any]]:
    """One row for each CSV file in `folder`, in order of name, and one for a step of 5,000 buffers.

    Keys: name, num_buffers, lower_bound, greedy_height, height (bytes), ratio (height / lower bound), capacity (bytes or None),
    fits (None without a capacity), method, seconds (of the whole of lay_out, at most about `time_limit_s`).
    A file's capacity is the number in its name, as in `A.1048576.csv`; the search ends there.

    Raises UserError for a folder that is not there or has no CSV file, and for a file that cannot be read.
    """
    problems: list[tuple[str, list[Buffer], int | None, int]] = []
    if folder is not None:
        paths = sorted(folder.glob("*.csv"))
        if not paths:
            raise UserError(f"{folder}: no such folder, or no file in it ends in .csv; expected files such as A.1048576.csv")
        problems = [(path.name.split(".")[0], read_csv(path), _capacity(path), 1) for path in paths]
    problems.append(("step", step_like(100, seed=0), None, STEP_ALIGNMENT))
    return [_row(*problem, time_limit_s, num_workers) for problem in problems]


def run(arguments: list[str], *, as_json: bool) -> int:
    """The command; exit code 0."""
    parser = argparse.ArgumentParser(prog="packhorse bench layout", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="folder of CSV files: id,lower,upper,size")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit for each file")
    parser.add_argument("--workers", type=int, default=2, help="threads of the search")
    asked = parser.parse_args(arguments)
    rows = measure(asked.folder, asked.seconds, asked.workers)
    print(json.dumps(rows) if as_json else render(rows))
    return 0


def render(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of `measure` as a plain table with aligned columns; bytes in full."""
    header = ["name", "buffers", "lower bound", "greedy", "height", "height/bound", "capacity", "fits", "method", "seconds"]
    lines = [header]
    for row in rows:
        capacity = "-" if row["capacity"] is None else f"{row['capacity']:,}"
        fits = {None: "-", True: "yes", False: "no"}[row["fits"]]
        numbers = [f"{row[key]:,}" for key in ("num_buffers", "lower_bound", "greedy_height", "height")]
        lines.append([row["name"], *numbers, f"{row['ratio']:.4f}", capacity, fits, row["method"], f"{row['seconds']:.2f}"])
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    words = (0, 8)  # columns of words are set to the left, numbers to the right
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in words else cell.rjust(width) for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def step_like(num_blocks: int, seed: int) -> list[Buffer]:
    """50 * num_blocks buffers alive as in a training step; the best height, and the lower bound, is (all saved) + 2 * (a loss buffer).

    One operator runs at each time. Of a block's forward operators some write a saved value, alive until some operator of the
    block's own backward, the others a temporary that the next operator reads. Backward operators write temporaries. In between two
    buffers of the loss, as large as the largest temporary, are alive together with every saved value. Why that is the best
    height: saved values stacked without reuse, and above them two slots of the largest temporary, used in turn.
    """
    generator = np.random.default_rng(seed)
    largest = 4096 * STEP_ALIGNMENT

    def some_bytes() -> int:
        return int(generator.integers(1, 4096 + 1)) * STEP_ALIGNMENT

    saved: list[list[tuple[str, int, int]]] = []  # of each block: (name, time written, size)
    buffers: list[Buffer] = []
    now = 0
    for block in range(num_blocks):
        saved.append([])
        for k, is_saved in enumerate(generator.permutation([True] * FORWARD_SAVED + [False] * FORWARD_TEMPORARY)):
            if is_saved:
                saved[-1].append((f"block{block}.saved{k}", now, some_bytes()))
            else:
                buffers.append(Buffer(f"block{block}.forward{k}", now, now + 2, some_bytes()))
            now += 1
    now += 1  # the last forward temporary ends, so that no three temporaries are ever alive together
    buffers += [Buffer(f"loss{k}", now, now + 2, largest) for k in range(2)]
    now += 2
    for block in reversed(range(num_blocks)):
        num_operators = BACKWARD_TEMPORARY - (2 if block == num_blocks - 1 else 0)  # the loss took two of the 50
        for name, written, size in saved[block]:
            buffers.append(Buffer(name, written, now + int(generator.integers(1, num_operators + 1)), size))
        for k in range(num_operators):
            buffers.append(Buffer(f"block{block}.backward{k}", now, now + 2, some_bytes()))
            now += 1
    return buffers


def _capacity(path: Path) -> int | None:
    match = re.fullmatch(r".+\.(\d+)\.csv", path.name)
    return int(match[1]) if match else None


def _row(name: str, buffers: list[Buffer], capacity: int | None, alignment: int, time_limit_s: float, num_workers: int) -> dict[str, Any]:
    greedy = greedy_layout(buffers, alignment)
    begin = time.perf_counter()
    layout = lay_out(buffers, alignment=alignment, time_limit_s=time_limit_s, capacity=capacity, num_workers=num_workers)
    seconds = time.perf_counter() - begin
    return {
        "name": name,
        "num_buffers": len(buffers),
        "lower_bound": layout.lower_bound,
        "greedy_height": greedy.height,
        "height": layout.height,
        "ratio": layout.height / layout.lower_bound if layout.lower_bound else 1.0,
        "capacity": capacity,
        "fits": None if capacity is None else layout.height <= capacity,
        "method": layout.method,
        "seconds": seconds,
    }
