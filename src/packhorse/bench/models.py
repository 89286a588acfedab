"""`packhorse bench models`: one training step of each kind of model by eager PyTorch and by packhorse, interleaved in one run.

A BERT, a ResNet-50, a recurrent language model as unrolled cells and as nn.LSTM. CPU seconds are the process's own; ratios are the median over rounds
of the ratio inside a round. Eager keeps its gradients allocated between steps (`zero_grad(set_to_none=False)`), and with --set-to-none it does not.
The eager nn.LSTM is oneDNN's fused layer; packhorse runs the operators that it is made of.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from packhorse.bench.rivals import eager, planned
from packhorse.bench.step import Cost, allocator_peak, cost, write_between
from packhorse.errors import UserError
from packhorse.models.bert import BERT
from packhorse.models.lstm import LSTM
from packhorse.models.resnet import resnet

BEGIN, END = "<!-- bench models: begin -->", "<!-- bench models: end -->"


def _tokens(vocab: int, batch: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(0, vocab, (batch, length + 1))
    return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def _images(batch: int, side: int) -> dict[str, Tensor]:
    return {"images": torch.randn(batch, 3, side, side), "labels": torch.randint(0, 1000, (batch,))}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "BERT, 4 layers, width 256, 8 x 128 tokens": (
        lambda: BERT(vocab=8192, layers=4, width=256, heads=8, seq_len=128),
        lambda: _tokens(8192, 8, 128),
    ),
    "ResNet-50, 4 x 3 x 128 x 128": (lambda: resnet(50, images="imagenet"), lambda: _images(4, 128)),
    "LSTM cells unrolled, 2 layers, width 256, 32 x 32 tokens": (
        lambda: LSTM(vocab=2000, layers=2, width=256, dropout=0.1),
        lambda: _tokens(2000, 32, 32),
    ),
    "nn.LSTM, 2 layers, width 256, 32 x 32 tokens": (
        lambda: LSTM(vocab=2000, layers=2, width=256, dropout=0.1, unrolled=False),
        lambda: _tokens(2000, 32, 32),
    ),
}


def measure(name: str, rounds: int, set_to_none: bool) -> dict[str, Any]:
    """The figures of one model as JSON-able values."""
    torch.manual_seed(0)
    make, batch_of = MODELS[name]
    model, batch = make().train(), batch_of()
    ours, step = planned(model, batch)
    theirs = eager(model, batch, set_to_none=set_to_none)
    for run in (theirs, ours):
        run(), run()
    pairs: list[tuple[Cost, Cost]] = [(cost(theirs), cost(ours)) for _ in range(rounds)]
    peak, ledger = allocator_peak(theirs), step.ledger()
    measured = dict(ledger.measured)
    return {
        "model": name,
        "eager_cpu_s": statistics.median(e.cpu_s for e, _ in pairs),
        "cpu_ratio": statistics.median(p.cpu_s / e.cpu_s for e, p in pairs),
        "eager_faults": statistics.median(e.faults for e, _ in pairs),
        "faults": statistics.median(p.faults for _, p in pairs),
        "arena_ratio": measured["arena"] / peak,
        "memory_ratio": (measured["arena"] + measured["external"]) / peak,
        "exact": ledger.measured_peak_bytes == ledger.predicted_peak_bytes,
    }


def render(rows: list[dict[str, Any]], rounds: int, set_to_none: bool) -> str:
    """The figures as a Markdown table."""
    lines = [
        f"{torch.get_num_threads()} thread(s), median of {rounds} interleaved rounds, eager with set_to_none={set_to_none}.",
        "",
        "| model | eager: CPU s a step | packhorse / eager | page faults, eager | packhorse | arena / peak of intermediates | with adopted |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['model']} | {r['eager_cpu_s']:.3f} | {r['cpu_ratio']:.3f} | {r['eager_faults']:.0f} | {r['faults']:.0f} "
        f"| {r['arena_ratio']:.3f} | {r['memory_ratio']:.3f} |"
        for r in rows
    ]
    return "\n".join(lines)


def run(arguments: list[str], *, as_json: bool) -> int:
    """The command. Exit code 0 if memory was as predicted, else 1."""
    parser = argparse.ArgumentParser(prog="packhorse bench models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set-to-none", action="store_true", help="eager frees its gradients at each step")
    parser.add_argument("--write", type=Path, help="Markdown file whose table is replaced")
    asked = parser.parse_args(arguments)
    if asked.rounds < 1 or asked.threads < 1:
        raise UserError(f"bench models: --rounds {asked.rounds} --threads {asked.threads}: expected 1 or more of each")
    if asked.write:
        write_between(asked.write, BEGIN, END, None)
    torch.set_num_threads(asked.threads)
    rows = [measure(name, asked.rounds, asked.set_to_none) for name in MODELS]
    text = render(rows, asked.rounds, asked.set_to_none)
    print(json.dumps(rows) if as_json else text)
    if asked.write:
        write_between(asked.write, BEGIN, END, text)
    return int(not all(row["exact"] for row in rows))
