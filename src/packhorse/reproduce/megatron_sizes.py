"""`packhorse reproduce megatron`: the models of table 1 of Shoeybi et al. 2019 (arXiv:1909.08053), planned as one of their tp ranks would run them.

The paper's recipe (sections 4.2 and 5.1): batch 8 of 1,024 tokens, a vocabulary of 51,200, fp16 with fp32 master weights, Adam, gradients clipped at
norm 1, dropout 0.1, every block computed again in the backward pass. The model is on meta: nothing is allocated.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import packhorse
from packhorse.models.gpt import gpt
from packhorse.models.sizes import Size, find_size
from packhorse.planning.plan import Plan
from packhorse.reproduce.claims import Claim

# size -> (tp, billions of parameters as the paper prints them)
TABLE = {"megatron-1.2b": (1, 1.2), "megatron-2.5b": (2, 2.5), "megatron-4.2b": (4, 4.2), "megatron-8.3b": (8, 8.3)}
SAMPLES, TOKENS, DROPOUT = 8, 1024, 0.1
DEVICE_BYTES = 32 * 2**30  # of the paper's V100
BYTES_A_PARAMETER = 16  # fp16 parameter and gradient; fp32 master weight and two states of Adam (ZeRO, section 3.1)


@dataclass(frozen=True)
class Planned:
    """One size on one rank. whole: parameters of the model; parameters: of this rank, expected: by the closed form; all in numbers, not bytes.

    persistent_bytes, peak_bytes, sent_bytes: of this rank, sent in a step. keep_bytes: the peak of the step that computes nothing again.
    planning_s: CPU seconds from the model on meta to the plan.
    """

    name: str
    size: Size
    ranks: int
    whole: int
    parameters: int
    expected: int
    persistent_bytes: int
    peak_bytes: int
    keep_bytes: int
    sent_bytes: int
    planning_s: float


def whole_parameters(size: Size) -> int:
    """12 L h^2 + 13 L h + (v + s + 2) h of a GPT with tied embeddings and learned positions."""
    layers, width = size.layers, size.width
    return 12 * layers * width**2 + 13 * layers * width + (size.vocab + size.seq_len + 2) * width


def rank_parameters(size: Size, ranks: int) -> int:
    """Of one of N tp ranks: matrices, the biases of those that are cut by columns (3 h and 4 h) and the vocabulary over N; norms, the biases of those
    that are cut by rows and positions whole. N divides heads and vocabulary."""
    layers, width = size.layers, size.width
    return (12 * layers * width**2 + 7 * layers * width + size.vocab * width) // ranks + 6 * layers * width + (size.seq_len + 2) * width


def plan_of(size: Size, ranks: int) -> Plan:
    """The plan of the last rank."""
    with torch.device("meta"):
        model = gpt(size, dropout=DROPOUT).train()
        ids = torch.zeros(SAMPLES, min(TOKENS, size.seq_len), dtype=torch.long)
    return packhorse.plan(
        model,
        {"ids": ids, "labels": ids},
        optimizer=torch.optim.AdamW(model.parameters(), lr=1.5e-4, fused=True),
        precision="fp16",
        clip_norm=1.0,
        mesh=packhorse.Mesh(tp=ranks),
        rank=ranks - 1,
        recompute="blocks",
    )


def measure(name: str, size: Size, ranks: int) -> Planned:
    """Plans it."""
    begin = time.process_time()
    plan = plan_of(size, ranks)
    seconds = time.process_time() - begin
    own = sum(slot.value.num_elements for run in plan.persistent.runs if run.kind == "parameters" for slot in run.slots)
    return Planned(
        name,
        size,
        ranks,
        whole_parameters(size),
        own,
        rank_parameters(size, ranks),
        plan.persistent_bytes,
        plan.peak_bytes,
        plan.keep_everything_bytes,
        plan.comm_bytes,
        seconds,
    )


def sizes(names: tuple[str, ...]) -> Iterator[Planned]:
    """Of each name of TABLE."""
    for name in names:
        yield measure(name, find_size("gpt", name), TABLE[name][0])


def claims(found: list[Planned]) -> Iterator[Claim]:
    """What the paper says of them."""
    for p in found:
        printed = TABLE[p.name][1]
        where = f"{p.name}, tp {p.ranks}"
        yield Claim(f"{where}: parameters", f"{printed} billion", f"{p.whole / 1e9:.4f} billion", round(p.whole / 1e9, 1) == printed)
        text = f"{p.parameters:,}, closed form {p.expected:,}"
        yield Claim(f"{where}: parameters of a rank", "", text, p.parameters == p.expected)
        yield Claim(f"{where}: one rank's step", "ran on a device of 32 GB", f"{p.peak_bytes / 2**30:.1f} GiB", p.peak_bytes < DEVICE_BYTES)


def table(found: list[Planned]) -> str:
    """A Markdown table."""
    lines = [
        f"Batch {SAMPLES} of {TOKENS:,} tokens, fp16, blocks computed again, dropout {DROPOUT}; bytes of one rank; CPU seconds to plan it:",
        "",
        "| size | channels | heads | layers | tp | parameters of a rank | persistent | at 16 bytes each | peak | peak, keeping everything "
        "| sent each step | planned in |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {p.name} | {p.size.width} | {p.size.heads} | {p.size.layers} | {p.ranks} | {p.parameters:,} | {p.persistent_bytes:,} "
        f"| {BYTES_A_PARAMETER * p.parameters:,} | {p.peak_bytes:,} | {p.keep_bytes:,} | {p.sent_bytes:,} | {p.planning_s:.0f} s |"
        for p in found
    ]
    return "\n".join(lines)
