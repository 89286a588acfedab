"""`packhorse reproduce megatron`: what the tp ranks send each other, read off planned programs. No process is started and nothing is allocated.

b samples, s tokens, h channels, v vocabulary, L blocks, N tp ranks. Expected figures: Shoeybi et al. 2019, arXiv:1909.08053, section 3: all-reduces
of b s h elements, two a block forward (g) and two backward (f), one for the input embedding and one at the output head; of the loss over a split
vocabulary three numbers a token.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

import packhorse
from packhorse.graph.ir import Graph, Ref
from packhorse.graph.operators import TENSOR_GATHER, TENSOR_SCATTER, TENSOR_SUM, is_tensor_collective
from packhorse.models.bert import BERT
from packhorse.models.gpt import GPT
from packhorse.parallel.volume import CHECKSUM_BYTES, GREETING_BYTES
from packhorse.planning.plan import Plan
from packhorse.reproduce.claims import Claim

BLOCKS, SAMPLES, TOKENS, CHANNELS, HEADS, VOCAB = 8, 4, 256, 128, 8, 2048
KEY_VALUE_HEADS = 8  # of Llama, which has twice as many heads
ITEM = 4  # bytes of a float32
ROWS = 3  # numbers a token that the loss of a split vocabulary needs of each rank


def _gpt(dropout: float) -> nn.Module:
    return GPT(vocab=VOCAB, layers=BLOCKS, width=CHANNELS, heads=HEADS, seq_len=TOKENS, dropout=dropout)


def _bert(dropout: float) -> nn.Module:
    return BERT(vocab=VOCAB, layers=BLOCKS, width=CHANNELS, heads=HEADS, seq_len=TOKENS, dropout=dropout, pre_norm=True)


def _llama(dropout: float) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=CHANNELS,
        intermediate_size=3 * CHANNELS,
        num_hidden_layers=BLOCKS,
        num_attention_heads=2 * HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        max_position_embeddings=TOKENS,
        attention_dropout=dropout,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


MODELS: dict[str, Callable[[float], nn.Module]] = {"GPT": _gpt, "BERT": _bert, "Llama (Hugging Face)": _llama}


@dataclass(frozen=True)
class How:
    """How a step is planned. recompute: "none" or "blocks", in the least bytes."""

    name: str
    recompute: str = "none"
    sequence_parallel: bool = False
    dropout: float = 0.0


PLAIN, SEQUENCE = How("plain"), How("sequence parallel", sequence_parallel=True)
BLOCK_BY_BLOCK, BLOCKS_DROPOUT = How("blocks again", "blocks"), How("blocks again, dropout", "blocks", dropout=0.1)
WAYS = (PLAIN, SEQUENCE, BLOCK_BY_BLOCK)


@dataclass(frozen=True)
class Count:
    """What one rank of N sends in a step of one model.

    whole: (operator, phase) -> collectives of b s h elements. others: elements of every other collective between tp ranks, in the order of the
    program. replicated: elements of all parameters that every rank has whole. again: calls that are computed again. sent: bytes in a step.
    """

    model: str
    ranks: int
    how: str
    whole: dict[tuple[str, str], int]
    others: tuple[int, ...]
    replicated: int
    again: int
    sent: int

    def of(self, op: str, phase: str) -> int:
        """Collectives of b s h elements."""
        return self.whole.get((op, phase), 0)


def planned(make: Callable[[float], nn.Module], ranks: int, how: How) -> Plan:
    """The plan of the last rank."""
    with torch.device("meta"):
        model = make(how.dropout).train()
        ids = torch.zeros(SAMPLES, TOKENS, dtype=torch.long)
    batch = {"ids" if isinstance(model, (GPT, BERT)) else "input_ids": ids, "labels": ids}
    return packhorse.plan(
        model,
        batch,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        clip_norm=1.0,
        mesh=packhorse.Mesh(tp=ranks),
        rank=ranks - 1,
        recompute=how.recompute,
        sequence_parallel=how.sequence_parallel,
    )


def collectives(graph: Graph) -> Iterator[tuple[str, str, int]]:
    """(operator, phase, elements of the whole tensor) of every collective between tp ranks."""
    for node in graph.nodes:
        if is_tensor_collective(node.op):
            assert isinstance(node.args[0], Ref) and node.outputs[0] is not None
            given, made = graph.values[node.args[0].name].num_elements, node.outputs[0].num_elements
            yield node.op, node.phase, max(given, made)


def count(name: str, ranks: int, how: How) -> Count:
    """Of one model of MODELS."""
    plan = planned(MODELS[name], ranks, how)
    hidden = SAMPLES * TOKENS * CHANNELS
    graph = plan.programs["first"].graph
    found = list(collectives(graph))
    whole = Counter((op, phase) for op, phase, elements in found if elements == hidden)
    others = tuple(elements for _, _, elements in found if elements != hidden)
    own = [slot for run in plan.persistent.runs if run.kind == "parameters" for slot in run.slots]
    replicated = sum(slot.value.num_elements for slot in own if slot.part is None)
    again = sum(node.phase == "recompute" and not node.is_view for node in graph.nodes)
    return Count(name, ranks, how.name, dict(whole), others, replicated, again, plan.comm_bytes)


def expected_bytes(found: Count) -> float:
    """Bytes that the rank should send in a step, from the numbers of collectives: 2 (N-1)/N of a tensor for an all-reduce, half as much for each of
    its halves; three numbers a token of the loss to every other rank; one number of the norm; what ranks tell each other before a step."""
    others, hidden = found.ranks - 1, SAMPLES * TOKENS * CHANNELS
    share = others / found.ranks
    halves = sum(times * (2 if op == TENSOR_SUM else 1) for (op, _), times in found.whole.items())
    gradients = found.replicated if found.how == SEQUENCE.name else 0
    tensors = share * (halves * hidden + 2 * gradients)
    return ITEM * (tensors + others * (ROWS * SAMPLES * TOKENS + 1)) + others * (GREETING_BYTES + CHECKSUM_BYTES)


def counts(degrees: tuple[int, ...]) -> Iterator[Count]:
    """Of every model at every degree, planned in every way; and of a GPT with dropout."""
    for name in MODELS:
        for ranks in degrees:
            yield from (count(name, ranks, how) for how in WAYS)
    yield count("GPT", degrees[0], BLOCKS_DROPOUT)


def claims(found: list[Count]) -> Iterator[Claim]:
    """What the paper says of them."""
    degrees = ", ".join(map(str, sorted({c.ranks for c in found})))
    for name in dict.fromkeys(c.model for c in found):
        mine = {how: [c for c in found if (c.model, c.how) == (name, how)] for how in dict.fromkeys(c.how for c in found)}
        yield from _of_model(f"{name}, tp {degrees}", mine)
        if mine.get(BLOCKS_DROPOUT.name):
            dropped = mine[BLOCKS_DROPOUT.name]
            yield _of_blocks(f"{name} with dropout, tp {dropped[0].ranks}: blocks computed again", dropped)


def _of_model(where: str, mine: dict[str, list[Count]]) -> Iterator[Claim]:
    plain, sequence = mine[PLAIN.name], mine[SEQUENCE.name]
    forward, backward = ({c.of(TENSOR_SUM, phase) for c in plain} for phase in ("forward", "backward"))
    wanted = {2 * BLOCKS + 1}
    yield Claim(f"{where}: all-reduces forward", "2 a layer, 1 for the input embedding", _layers(forward), forward == wanted)
    yield Claim(f"{where}: all-reduces backward", "2 a layer, 1 at the head", _layers(backward), backward == wanted)
    only = all(c.others == (c.ranks * ROWS * SAMPLES * TOKENS,) for c in plain)
    most = max(max(c.others) / (SAMPLES * TOKENS * VOCAB / c.ranks) for c in plain)
    text = (
        f"1 collective of 3 b s from each rank, at most {most:.3f} of b s v / tp" if only else f"collectives of {sorted({c.others for c in plain})}"
    )
    yield Claim(f"{where}: loss over a split vocabulary", "b s, never b s v", text, only and most < 1)
    scattered = {(c.of(TENSOR_SCATTER, "forward"), c.of(TENSOR_SCATTER, "backward")) for c in sequence}
    gathered = {(c.of(TENSOR_GATHER, "forward"), c.of(TENSOR_GATHER, "backward")) for c in sequence}
    sums = sum(c.of(TENSOR_SUM, phase) for c in sequence for phase in ("forward", "backward"))
    again = {c.of(TENSOR_GATHER, "backward") - c.of(TENSOR_SCATTER, "backward") for c in sequence}
    text = f"reduce-scatters {_pairs(scattered)}, all-gathers {_pairs(gathered)}, all-reduces {sums}"
    halves = scattered == {(2 * BLOCKS + 1, 2 * BLOCKS + 1)} and gathered == {(2 * BLOCKS + 1, 4 * BLOCKS + 2)}
    note = f"; {_numbers(again)} of the all-gathers bring again what was not kept"
    yield Claim(
        f"{where}: sequence parallel, forward + backward", "each all-reduce is a reduce-scatter and an all-gather", text + note, halves and not sums
    )
    small = all(sum(c.others) == c.ranks * ROWS * SAMPLES * TOKENS + c.replicated for c in sequence)
    text = f"{_numbers({c.replicated for c in sequence})} elements besides" if small else f"collectives of {sorted({c.others for c in sequence})}"
    yield Claim(f"{where}: sequence parallel, gradients of whole parameters", "added up over ranks once", text, small)
    yield _of_blocks(f"{where}: blocks computed again", mine[BLOCK_BY_BLOCK.name])
    everything = [c for how in (plain, sequence, mine[BLOCK_BY_BLOCK.name]) for c in how]
    exact = sum(c.sent == expected_bytes(c) for c in everything)
    yield Claim(
        f"{where}: bytes sent",
        "2 (N-1)/N of a tensor an all-reduce",
        f"{exact} of {len(everything)} plans are the closed form",
        exact == len(everything),
    )


def _of_blocks(what: str, found: list[Count]) -> Claim:
    more = {c.of(TENSOR_SUM, "recompute") for c in found}
    rest = all(c.of(TENSOR_SUM, phase) == 2 * BLOCKS + 1 for c in found for phase in ("forward", "backward"))
    text = f"{_numbers(more)} more all-reduces in {BLOCKS} layers, {_numbers({c.again for c in found})} calls again"
    return Claim(what, "at most 2 more a layer (ZeRO, section 8)", text, rest and all(c.again for c in found) and max(more) <= 2 * BLOCKS)


def _layers(found: set[int]) -> str:
    return ", ".join(f"{n} = {(n - 1) / BLOCKS:g} x {BLOCKS} + 1" for n in sorted(found))


def _pairs(found: set[tuple[int, int]]) -> str:
    return ", ".join(f"{forward} + {backward}" for forward, backward in sorted(found))


def _numbers(found: set[int]) -> str:
    return " or ".join(f"{n:,}" for n in sorted(found))


def table(found: list[Count]) -> str:
    """A Markdown table."""
    lines = [
        f"b = {SAMPLES} samples of s = {TOKENS} tokens, h = {CHANNELS} channels, v = {VOCAB} tokens, L = {BLOCKS} blocks, float32, AdamW; "
        "collectives of b s h elements in a step, forward + backward + computed again; bytes that the last rank sends in a step:",
        "",
        "| model | tp | planned | all-reduces | reduce-scatters | all-gathers | elements of other collectives | bytes sent | closed form |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for c in found:
        cells = [
            " + ".join(str(c.of(op, phase)) for phase in ("forward", "backward", "recompute")) for op in (TENSOR_SUM, TENSOR_SCATTER, TENSOR_GATHER)
        ]
        others = ", ".join(f"{n:,}" for n in c.others)
        lines.append(f"| {c.model} | {c.ranks} | {c.how} | {' | '.join(cells)} | {others} | {c.sent:,} | {expected_bytes(c):,.0f} |")
    return "\n".join(lines)
