"""What the tensor pass marks as replicated has the same bits on all ranks, with dropout on: so any rank's slice of it is a slice of every rank's.

lockstep.py compares every marked result, in these tests and in all others that use it.
"""

from functools import cache

import pytest
import torch
from torch import Generator
from torch.nn import functional

from lockstep import _inputs, run_side_by_side
from packhorse.capture.capture import capture
from packhorse.capture.tensor_plan import sharding_of
from packhorse.graph.verify import verify
from packhorse.mesh import Mesh
from packhorse.models.bert import BERT
from packhorse.models.gpt import GPT
from packhorse.parallel.split import Sharding
from packhorse.parallel.tensor.split_graph import split_graph
from packhorse.parallel.tensor.spread import INSIDE, OUTSIDE
from packhorse.residency.saved import saved_values

pytestmark = pytest.mark.cpu
B, T, D, V, L, H = 2, 8, 16, 131, 2, 4


def causal(output, batch):
    return functional.cross_entropy(output.logits.flatten(0, 1), batch["input_ids"].flatten())


def llama():
    import transformers

    sizes = {"hidden_size": D, "intermediate_size": 24, "num_hidden_layers": L, "num_attention_heads": H, "num_key_value_heads": 2, "vocab_size": V}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, use_cache=False, attention_dropout=0.3))


MODELS = {
    "GPT": lambda: GPT(vocab=V, layers=L, width=D, heads=H, seq_len=T, dropout=0.3),
    "BERT": lambda: BERT(vocab=V, layers=L, width=D, heads=H, seq_len=T, dropout=0.3),
    "Llama": llama,
}


@cache
def made(name):
    """(model, batch, its captured graph)"""
    torch.manual_seed(1)
    model = MODELS[name]().train()
    tokens = torch.randint(0, V, (B, T))
    batch = {"ids": tokens, "labels": tokens} if name != "Llama" else {"input_ids": tokens}
    return model, batch, capture(model, batch, causal if name == "Llama" else None)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole sequences", "split sequences"])
@pytest.mark.parametrize("name", MODELS)
def test_marked_results_have_the_same_bits(name, sequence):
    model, batch, captured = made(name)
    splits = dict(sharding_of(model, Mesh(tp=2), 0).splits)
    shardings = [Sharding(2, rank, splits, sequence) for rank in range(2)]
    graphs = [split_graph(captured.micro, sharding)[0] for sharding in shardings]
    for graph in graphs:
        verify(graph)
    streams = [{OUTSIDE: Generator().manual_seed(3), INSIDE: Generator().manual_seed(4 + rank)} for rank in range(2)]
    alike: set[str] = set()
    run_side_by_side(graphs, [_inputs(graph, model, batch, captured, own) for graph, own in zip(graphs, shardings)], streams, alike)
    draws = {node.generator for node in graphs[0].nodes if node.rng_in is not None}
    assert draws == ({OUTSIDE, INSIDE} if name != "Llama" and not sequence else {INSIDE})
    saved = saved_values(graphs[0])
    wide = {s.value.name for s in saved if s.value.num_elements >= B * T * D}
    marked = {s.value.name for s in saved if s.replicated}
    # the input of every split layer, two a block, and more beside it; where sequences are split, they lie in parts and are gathered again when needed
    assert marked <= alike and (len(marked & wide) >= 2 * L if not sequence else not marked & wide)
    # what a rank has of its own heads is its own
    assert any(not s.replicated and s.value.name not in alike for s in saved)
