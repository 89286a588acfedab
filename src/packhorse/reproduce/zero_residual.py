"""`packhorse reproduce zero`: ZeRO-R (table 3, sections 6.1 and 8 of Rajbhandari et al. 2019, arXiv:1910.02054).

The five configurations of table 3 as five plans of one GPT, run for real on dp 2 x tp 2 ranks of this machine; what P_a sends besides tensor
parallelism, off plans of one rank of several widths; and what a model of 100 billion parameters saves.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from packhorse.bench.jobs import run_job
from packhorse.graph.operators import ALL_GATHER, TENSOR_SUM
from packhorse.mesh import Mesh
from packhorse.models.gpt import GPT
from packhorse.models.sizes import Size, find_size
from packhorse.parallel.volume import sent_by
from packhorse.planning.plan import Plan
from packhorse.reproduce.claims import Claim
from packhorse.reproduce.zero_residual_job import Config, Ran, Saved, planned, saved_of
from packhorse.reproduce.zero_storage import GIGABYTE, KINDS

JOB, SECONDS = "packhorse.reproduce.zero_residual_job", 1800
CONFIGS = (
    Config("C1", "P_os, C_B + M_D", 1, "keep"),
    Config("C2", "P_os, C_B + M_D + P_a", 1, "shard"),
    Config("C3", "P_os+g, C_B + M_D", 2, "keep"),
    Config("C4", "P_os+g, C_B + M_D + P_a", 2, "shard"),
    Config("C5", "P_os+g, C_B + M_D + P_a+cpu", 2, "offload"),
)
DP, TP, STEPS, SAMPLES, VOCAB = 2, 2, 2, 2, 256
SHAPE = {"layers": 4, "width": 64, "heads": 4, "seq_len": 32}
TRAFFIC = ((64, 2), (96, 3), (128, 4), (256, 8))  # width, tp
BLOCK_MESSAGES = 5  # all-reduces of a block: two forward, one when it is computed again, two backward
PAPER_MESSAGES = 6  # the paper computes the whole block again
LARGE, LARGE_TP, LARGE_SAMPLES = "zero-100b", 16, 32


@dataclass(frozen=True)
class States:
    """Model states of rank 0. elements: of its parameters; formula: the paper's, from those; num_bytes: as planned, padding and step counts
    included."""

    config: str
    precision: str
    elements: int
    formula: float
    num_bytes: int

    @property
    def padding(self) -> float:
        return self.num_bytes - self.formula


@dataclass(frozen=True)
class Block:
    """What a rank sends over tp for one block. message: bytes of the block's input. sums, gathers: collectives; *_bytes: what they send."""

    width: int
    tp: int
    message: int
    sums: int
    sums_bytes: int
    gathers: int
    gathers_bytes: int

    @property
    def more(self) -> float:
        """What P_a adds to what tensor parallelism sends."""
        return self.gathers_bytes / self.sums_bytes

    @property
    def more_as_printed(self) -> float:
        """The same, with as many all-reduces as the paper counts."""
        return self.gathers_bytes / (self.sums_bytes / self.sums * PAPER_MESSAGES)


@dataclass(frozen=True)
class Large:
    """Saved values of all blocks of the large model, of a rank: whole, and as slices. a_block: the same of one block."""

    blocks: int
    whole_a_block: int
    slices_a_block: int

    @property
    def whole(self) -> int:
        return self.blocks * self.whole_a_block

    @property
    def slices(self) -> int:
        return self.blocks * self.slices_a_block


def runs() -> dict[str, list[Ran]]:
    """Name of a configuration -> what became of it on each rank. Raises JobError."""
    asked = {"shape": SHAPE, "vocab": VOCAB, "samples": SAMPLES, "dp": DP, "tp": TP, "steps": STEPS, "configs": [asdict(c) for c in CONFIGS]}
    found = run_job(JOB, asked, DP * TP, seconds=SECONDS)
    return {c.name: [Ran(**row | {"saved": Saved(**row["saved"])}) for row in rows] for c, rows in zip(CONFIGS, found, strict=True)}


def formula(elements: int, stage: int, precision: str) -> float:
    """Bytes of model states of a rank (section 5): parameters and gradients of 2 bytes and 12 for the optimizer, or 4 and 4 and 8 in fp32."""
    parameter, gradient, optimizer = (2, 2, 12) if precision == "fp16" else (4, 4, 8)
    return elements * (parameter + (gradient / DP if stage == 2 else gradient) + optimizer / DP)


def most_padding(layers: int) -> int:
    """Bytes by which storage may exceed the formula: each of 12 tensors a block and 4 outside of them begins at a multiple of 64 bytes; what is used
    together, cut over tp or not, is padded to shares of as much, and has a line of 64 bytes of step counts. In at most 5 runs: parameters, master
    weights, gradients and two states."""
    tensors, together = 12 * layers + 4, 2 * (layers + 3)
    return 64 * (5 * (tensors + DP * together) + together)


def states_of(ran: Ran, config: Config) -> States:
    """Of rank 0 of a run, in fp32."""
    kept = sum(num_bytes for kind, num_bytes in ran.persistent.items() if kind in KINDS or kind.endswith("padding"))
    return States(config.name, "fp32", ran.elements, formula(ran.elements, config.stage, "fp32"), kept)


def mixed_states(elements: int) -> Iterator[States]:
    """Of rank 0 of each configuration in mixed precision, by plan alone. elements: of its parameters."""
    for config in CONFIGS:
        model, batch = _on_meta(Size(SHAPE["layers"], SHAPE["width"], SHAPE["heads"], VOCAB, SHAPE["seq_len"]), SAMPLES)
        plan = planned(model, batch, config, Mesh(dp=DP, tp=TP), 0, "fp16")
        kept = sum(n for kind, n in plan.persistent.bytes_by_kind().items() if kind in KINDS or kind.endswith("padding"))
        yield States(config.name, "fp16", elements, formula(elements, config.stage, "fp16"), kept)


def _on_meta(size: Size, samples: int) -> tuple[GPT, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        model = GPT(vocab=size.vocab, layers=size.layers, width=size.width, heads=size.heads, seq_len=size.seq_len).train()
        ids = torch.zeros(samples, size.seq_len, dtype=torch.long)
    return model, {"ids": ids, "labels": ids}


def _alone(size: Size, samples: int, tp: int, residency: str, precision: str = "fp32") -> Plan:
    """The plan of rank 0 of tp ranks, every block computed again."""
    return planned(*_on_meta(size, samples), Config("", "", 0, residency), Mesh(tp=tp), 0, precision)


def traffic() -> Iterator[Block]:
    """One block of each width: what a plan of four blocks sends more than one of three, with P_a."""
    for width, tp in TRAFFIC:
        size = Size(3, width, tp, VOCAB, SHAPE["seq_len"])
        three, four = (_sent(_alone(replace(size, layers=layers), SAMPLES, tp, "shard")) for layers in (3, 4))
        more = {op: (four[op][0] - three[op][0], four[op][1] - three[op][1]) for op in four}
        yield Block(width, tp, SAMPLES * size.seq_len * width * 4, *more[TENSOR_SUM], *more[ALL_GATHER])


def _sent(plan: Plan) -> dict[str, tuple[int, int]]:
    """Sums over tp, and gathers of slices -> how many, and bytes that a rank sends in them."""
    graph = plan.programs["first"].graph
    found = {TENSOR_SUM: (0, 0), ALL_GATHER: (0, 0)}
    for node in graph.nodes:
        if node.op in found and dict(node.kwargs)["axis"] == "tp":
            number, sent = found[node.op]
            found[node.op] = number + 1, sent + sent_by(node, graph)
    return found


def large() -> Large:
    """The paper's 100B in fp16, from plans of rank 0 for two and three of its blocks: every further block saves as much as the third."""
    size = find_size("gpt", LARGE)
    whole, slices = (
        [saved_of(_alone(replace(size, layers=layers), LARGE_SAMPLES, LARGE_TP, residency, "fp16"), LARGE_TP) for layers in (2, 3)]
        for residency in ("keep", "shard")
    )
    return Large(size.layers, whole[1].uncut - whole[0].uncut, slices[1].slices - slices[0].slices)


def residual() -> tuple[dict[str, list[Ran]], list[States], list[Block], Large]:
    """All of it: the runs, the plans in mixed precision, what blocks send, the large model."""
    found = runs()
    return found, list(mixed_states(found["C1"][0].elements)), list(traffic()), large()


def claims(found: dict[str, list[Ran]], mixed: list[States], blocks: list[Block], of_large: Large) -> Iterator[Claim]:
    """What the paper says of them."""
    rows = [ran for ranks in found.values() for ran in ranks]
    same = sum(ran.bits == rows[0].bits for ran in rows)
    yield Claim("C1 to C5: losses and gradients", "the same training", f"the same bits in {same} of {len(rows)} ranks", same == len(rows))
    exact = sum(ran.exact for ran in rows)
    yield Claim("peak, bytes on the host, bytes sent", "", f"as planned in {exact} of {len(rows)} ranks, every step", exact == len(rows))
    yield from _of_states([states_of(found[c.name][0], c) for c in CONFIGS] + mixed)
    yield from _of_saved(found)
    ours = ", ".join(f"{block.sums} and {block.gathers}" for block in blocks)
    right = all((b.sums, b.gathers) == (BLOCK_MESSAGES, 1) for b in blocks)
    yield Claim("a block: all-reduces over tp, and gathers of P_a", "6 and 1", f"{ours}: computing again stops before the last all-reduce", right)
    volume = all(b.sums_bytes * b.tp == 2 * (b.tp - 1) * b.message * b.sums and b.gathers_bytes * b.tp == (b.tp - 1) * b.message for b in blocks)
    yield Claim("bytes of an all-reduce, and of a gather", "2 bsh, bsh", "(tp - 1)/tp of that, as every rank sends to the others", volume)
    tenth = all(b.gathers_bytes * 10 == b.sums_bytes for b in blocks)
    yield Claim("P_a sends more than tensor parallelism alone", "less than 10 %", f"{_shares(b.more for b in blocks)} with our 5", tenth)
    twelfth = all(b.gathers_bytes * 12 * b.sums == b.sums_bytes * PAPER_MESSAGES for b in blocks)
    yield Claim("the same, 6 all-reduces counted", "1/12 (bsh to 12 bsh)", _shares(b.more_as_printed for b in blocks), twelfth)
    text = f"{of_large.whole / GIGABYTE:.1f} GB to {of_large.slices / GIGABYTE:.2f} GB, 1/{of_large.whole / of_large.slices:g}"
    printed = "about 33 GB to about 2 GB (1 byte an element; 60 GB in its section 3.2)"
    yield Claim(f"{LARGE}, batch {LARGE_SAMPLES}, tp {LARGE_TP}: checkpoints of a rank", printed, text, of_large.whole == LARGE_TP * of_large.slices)


def _of_states(states: list[States]) -> Iterator[Claim]:
    bound = most_padding(SHAPE["layers"])
    for precision, one, two in (("fp32", "8 Psi + 8 Psi/N", "4 Psi + 12 Psi/N"), ("fp16", "4 Psi + 12 Psi/N", "2 Psi + 14 Psi/N")):
        mine = {s.config: s for s in states if s.precision == precision}
        text = "; ".join(f"{s.config} {s.num_bytes:,} ({s.padding:,.0f} of them padding and step counts)" for s in mine.values())
        holds = all(0 <= s.padding <= bound for s in mine.values())
        holds &= mine["C1"].num_bytes == mine["C2"].num_bytes > mine["C3"].num_bytes == mine["C4"].num_bytes == mine["C5"].num_bytes
        where = "run here" if precision == "fp32" else "planned"
        yield Claim(f"model states of a rank, {precision}, {where}", f"C1, C2: {one}; C3, C4, C5: {two}", text, holds)


def _of_saved(found: dict[str, list[Ran]]) -> Iterator[Claim]:
    for whole, cut in (("C1", "C2"), ("C3", "C4")):
        pairs = [(a.saved, b.saved) for a, b in zip(found[whole], found[cut], strict=True)]
        holds = all(
            a.cut == 0 and a.device == a.uncut == b.cut + b.uncut and b.slices * TP == b.cut + b.padding and b.device == b.slices + b.uncut
            for a, b in pairs
        )
        _, b = pairs[0]
        text = f"{b.cut:,} to {b.slices:,} ({b.padding} of padding on all ranks); {b.uncut} in values too small to cut"
        yield Claim(f"{cut}: bytes saved that tp ranks have alike", f"those of {whole} over tp", text, holds)
    mine = [(a.saved, b.saved) for a, b in zip(found["C4"], found["C5"], strict=True)]
    holds = all(b.device == 0 and b.slices == a.slices and b.host == b.slices + b.uncut for a, b in mine)
    b = mine[0][1]
    yield Claim("C5: the same, on the device and on the host", "nearly 0, and the slices", f"{b.device}, and {b.host:,}", holds)


def _shares(shares: Iterator[float]) -> str:
    return ", ".join(dict.fromkeys(f"1/{1 / share:g}" for share in shares))


def table(found: dict[str, list[Ran]], mixed: list[States], blocks: list[Block], of_large: Large) -> str:
    """Three Markdown tables."""
    shape = ", ".join(f"{key} {value}" for key, value in SHAPE.items())
    lines = [
        f"Rank 0 of dp {DP} x tp {TP}; GPT, {shape}, {VOCAB} tokens, {SAMPLES} samples a dp rank, float32, AdamW, every block computed again. "
        "Bytes, as measured:",
        "",
        "| | | model states | the same in fp16, planned | saved alike on tp ranks: device | host | sent | peak | bytes on the host |",
        "|---" * 9 + "|",
    ]
    for config, planned_states in zip(CONFIGS, mixed, strict=True):
        ran = found[config.name][0]
        of_states, of_saved = (states_of(ran, config).num_bytes, planned_states.num_bytes), (ran.saved.device, ran.saved.host)
        row = *of_states, *of_saved, ran.sent_bytes, ran.peak_bytes, ran.host_bytes
        lines.append(f"| {config.name} | {config.means} | " + " | ".join(f"{figure:,}" for figure in row) + " |")
    lines += [
        "",
        "One block, bytes that a rank sends over tp:",
        "",
        "| width | tp | input of the block | all-reduces | bytes | gathers of P_a | bytes | P_a over the all-reduces |",
        "|---" * 8 + "|",
    ]
    for b in blocks:
        figures_of_block = b.width, b.tp, b.message, b.sums, b.sums_bytes, b.gathers, b.gathers_bytes
        lines.append("| " + " | ".join(f"{figure:,}" for figure in figures_of_block) + f" | {b.more:.4f} |")
    lines += [
        "",
        f"{LARGE} at batch {LARGE_SAMPLES}, tp {LARGE_TP}, fp16, planned for 2 and 3 of its {of_large.blocks} blocks at full width, the rest by "
        f"arithmetic: a block saves {of_large.whole_a_block:,} bytes that tp ranks have alike, {of_large.slices_a_block:,} as slices; all blocks "
        f"{of_large.whole:,} and {of_large.slices:,}.",
    ]
    return "\n".join(lines)


def figures(found: dict[str, list[Ran]], mixed: list[States], blocks: list[Block], of_large: Large) -> dict[str, Any]:
    """All of it, JSON-able."""
    return {
        "runs": {name: [asdict(ran) for ran in ranks] for name, ranks in found.items()},
        "mixed": [asdict(one) for one in mixed],
        "blocks": [asdict(block) for block in blocks],
        "large": asdict(of_large),
    }
