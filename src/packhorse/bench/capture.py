"""`packhorse bench capture [--size gpt2-xl]`: how long capturing takes, and how much memory.

Two deep steps, a GPT of 125 blocks and an LSTM of 4 layers unrolled over 2,048 time steps, are captured from a few of their repetitions each
(packhorse/capture/stamp.py); how long a whole capture would take is estimated from one of a short step, by nodes. A published GPT is captured and
planned on the meta device. Seconds are the process's CPU; the memory is the largest resident set of the process, interpreter and torch included.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable
from typing import Any

import torch

import packhorse
from packhorse.capture.capture import capture
from packhorse.capture.stamp import captured_whole
from packhorse.errors import UserError
from packhorse.models.gpt import GPT, gpt
from packhorse.models.lstm import LSTM
from packhorse.models.sizes import find_size
from packhorse.units import format_bytes

Step = tuple[torch.nn.Module, dict[str, torch.Tensor]]

WITHIN_S = 15.0  # of CPU, for each of the deep steps


def measure(name: str, seq_len: int, batch: int) -> dict[str, Any]:
    """The figures of a published GPT as JSON-able values."""
    size = find_size("gpt", name)
    with torch.device("meta"):
        model = gpt(size)
    ids = torch.zeros(batch, seq_len, dtype=torch.int64)
    start = time.process_time()
    plan = packhorse.plan(model, {"ids": ids, "labels": ids}, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    return {
        "size": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch": batch,
        "seq_len": seq_len,
        "cpu_s": time.process_time() - start,
        "resident_bytes": _resident_bytes(),
        "nodes": len(plan.programs["first"].graph.nodes),
        "peak_bytes": plan.peak_bytes,
    }


def deep_gpt(blocks: int) -> Step:
    """Of the width of the smallest GPT-2, for 256 tokens."""
    with torch.device("meta"):
        model = GPT(vocab=50257, layers=blocks, width=768, heads=12, seq_len=256)
    ids = torch.zeros(4, 256, dtype=torch.int64)
    return model, {"ids": ids, "labels": ids}


def deep_lstm(steps: int) -> Step:
    """The net of Chen et al. 2016, section 5.3: 4 layers of 1,024 units, 5,000 classes, 64 texts."""
    with torch.device("meta"):
        model = LSTM(vocab=5000, layers=4, width=1024)
    ids = torch.zeros(64, steps, dtype=torch.int64)
    return model, {"ids": ids, "labels": ids}


def measure_deep(name: str, make: Callable[[int], Step], repetitions: int, few: int) -> dict[str, Any]:
    """Capturing a deep step, and what a whole capture of it would take at the seconds a node of one with `few` repetitions."""
    model, batch = make(few)
    start = time.process_time()
    short = captured_whole("micro", model, batch, None, True)
    whole_s = time.process_time() - start
    model, batch = make(repetitions)
    start = time.process_time()
    nodes = len(capture(model, batch, None).micro.nodes)
    return {
        "step": name,
        "nodes": nodes,
        "cpu_s": time.process_time() - start,
        "whole_cpu_s": whole_s / len(short.graph.nodes) * nodes,
        "resident_bytes": _resident_bytes(),
        "within_s": WITHIN_S,
    }


def run(arguments: list[str], *, as_json: bool) -> int:
    """The command. Exit code 0."""
    parser = argparse.ArgumentParser(prog="packhorse bench capture", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="gpt2-xl", help="name of a published GPT")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=125, help="of the deep GPT; 0: leave it out")
    parser.add_argument("--steps", type=int, default=2048, help="of the unrolled LSTM; 0: leave it out")
    asked = parser.parse_args(arguments)
    if asked.seq_len < 1 or asked.batch < 1:
        raise UserError(f"bench capture: --seq-len {asked.seq_len} --batch {asked.batch}: expected 1 or more of each")
    if asked.blocks < 0 or asked.steps < 0:
        raise UserError(f"bench capture: --blocks {asked.blocks} --steps {asked.steps}: expected 0 or more of each")
    find_size("gpt", asked.size)
    deep = []
    if asked.blocks:
        deep.append(measure_deep(f"GPT of {asked.blocks} blocks", deep_gpt, asked.blocks, 4))
    if asked.steps:
        deep.append(measure_deep(f"LSTM of 4 layers over {asked.steps:,} time steps", deep_lstm, asked.steps, 4))
    found = measure(asked.size, asked.seq_len, asked.batch)
    if as_json:
        print(json.dumps({**found, "deep": deep}))
        return 0
    for one in deep:
        print(
            f"{one['step']}: {one['nodes']:,} nodes captured in {one['cpu_s']:.1f} s of CPU (to reach: {one['within_s']:.0f} s), "
            f"where a whole capture would take {one['whole_cpu_s']:.0f} s; resident {format_bytes(one['resident_bytes'])}"
        )
    print(
        f"{found['size']}: {found['parameters']:,} parameters, batch {found['batch']} x {found['seq_len']} tokens: {found['nodes']} nodes captured "
        f"and planned in {found['cpu_s']:.1f} s of CPU, resident {format_bytes(found['resident_bytes'])}; "
        f"the step needs {format_bytes(found['peak_bytes'])}"
    )
    return 0


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
