"""`packhorse bench capture [--size gpt2-xl]`: how long capturing and planning a published GPT on the meta device takes, and how much memory.

Seconds are the process's CPU; the memory is the largest resident set of the process, interpreter and torch included.
"""

import argparse
import json
import resource
import time
from typing import Any

import torch

import packhorse
from packhorse.errors import UserError
from packhorse.models.gpt import gpt
from packhorse.models.sizes import find_size
from packhorse.units import format_bytes


def measure(name: str, seq_len: int, batch: int) -> dict[str, Any]:
    """The figures as JSON-able values."""
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
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "nodes": len(plan.programs["first"].graph.nodes),
        "peak_bytes": plan.peak_bytes,
    }


def run(arguments: list[str], *, as_json: bool) -> int:
    """The command. Exit code 0."""
    parser = argparse.ArgumentParser(prog="packhorse bench capture", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="gpt2-xl", help="name of a published GPT")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    asked = parser.parse_args(arguments)
    if asked.seq_len < 1 or asked.batch < 1:
        raise UserError(f"bench capture: --seq-len {asked.seq_len} --batch {asked.batch}: expected 1 or more of each")
    found = measure(asked.size, asked.seq_len, asked.batch)
    if as_json:
        print(json.dumps(found))
        return 0
    print(
        f"{found['size']}: {found['parameters']:,} parameters, batch {found['batch']} x {found['seq_len']} tokens: {found['nodes']} nodes captured "
        f"and planned in {found['cpu_s']:.1f} s of CPU, resident {format_bytes(found['resident_bytes'])}; "
        f"the step needs {format_bytes(found['peak_bytes'])}"
    )
    return 0
