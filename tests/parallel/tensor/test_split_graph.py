"""The graphs of tp ranks beside the graph of one: all outputs, and the collectives that the paper has."""

import random
from functools import cache

import pytest
import torch
from torch.nn import functional as F

from lockstep import compare
from packhorse.capture.tensor_plan import sharding_of
from packhorse.errors import BatchError
from packhorse.graph.operators import is_tensor_collective
from packhorse.mesh import Mesh
from packhorse.models.bert import BERT
from packhorse.models.gpt import GPT
from packhorse.parallel.split import Split

pytestmark = pytest.mark.cpu
B, T, D, V, L, H = 2, 8, 16, 131, 2, 4
BOUND = 1e-13


def causal(output, batch):
    return F.cross_entropy(output.logits.flatten(0, 1), batch["input_ids"].flatten())


def hugging_face(name, **sizes):
    import transformers

    config = {"hidden_size": D, "intermediate_size": 24, "num_hidden_layers": L, "num_attention_heads": H, "vocab_size": V, "use_cache": False}
    kind = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    return getattr(transformers, f"{name}{kind}")(getattr(transformers, f"{name}Config")(**config | sizes))


MODELS = {
    "GPT": lambda: GPT(vocab=V, layers=L, width=D, heads=H, seq_len=T),
    "BERT": lambda: BERT(vocab=V, layers=L, width=D, heads=H, seq_len=T, dropout=0.0),
    "Llama": lambda: hugging_face("Llama", num_key_value_heads=2),
    "Llama, tied": lambda: hugging_face("Llama", num_key_value_heads=2, tie_word_embeddings=True),
    "Llama, eager attention": lambda: hugging_face("Llama", num_key_value_heads=2, attn_implementation="eager"),
    "Qwen3": lambda: hugging_face("Qwen3", num_key_value_heads=2, head_dim=4),
    "GPT2": lambda: hugging_face("GPT2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, n_positions=T),
    "Gemma2": lambda: hugging_face("Gemma2", num_key_value_heads=2, head_dim=4),
    "Mamba": lambda: hugging_face("Mamba", state_size=4),
}


@cache
def made(name):
    """(model, batch, loss)"""
    torch.manual_seed(1)
    model = MODELS[name]().double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    tokens = torch.randint(0, V, (B, T))
    ours = name in ("GPT", "BERT")
    return model, {"ids": tokens, "labels": tokens} if ours else {"input_ids": tokens}, None if ours else causal


CASES = [("GPT", 2, False), ("GPT", 2, True), ("GPT", 4, True), ("BERT", 2, False), ("BERT", 2, True), ("Llama", 2, True), ("Llama", 4, False)]
CASES += [("Llama", 4, True), ("Llama, tied", 2, False), ("Qwen3", 4, True), ("GPT2", 2, False), ("GPT2", 2, True)]


@pytest.mark.parametrize("name, degree, sequence", CASES)
def test_like_one_rank_with_the_collectives_of_the_paper(name, degree, sequence):
    model, batch, loss = made(name)
    splits = dict(sharding_of(model, Mesh(tp=degree), 0).splits)
    found = compare(model, batch, loss, splits, degree, sequence)
    assert max(apart for (role, target), apart in found.apart.items() if not target.endswith(("qkv.bias", "key.bias"))) < BOUND
    assert not found.gathered
    forward, backward = found.collectives("forward"), found.collectives("backward")
    # section 3: two all-reduces a layer in each direction; one more behind the input embedding, one in front of the output layer
    kind, size = ("scatter", B * T * D // degree) if sequence else ("sum", B * T * D)
    assert (forward[kind, size], backward[kind, size]) == (2 * L + 1, 2 * L + 1)
    if sequence:  # each all-reduce as a reduce-scatter and an all-gather; what the gather brought is not kept, so the backward pass gathers again
        assert forward["gather", B * T * D] == 2 * L + 1
        assert backward["gather", B * T * D] <= 2 * (2 * L + 1)
    # the loss: three numbers a row and rank
    assert forward["gather", 3 * B * T * degree] == 1
    sizes = [node.outputs[0].num_elements for node in found.graphs[0].nodes if is_tensor_collective(node.op) and node.module != "gradients"]
    assert max(sizes) < B * T * V // degree


@pytest.mark.parametrize("name", ["Llama, eager attention", "Gemma2", "Mamba", "GPT2", "BERT"])
@pytest.mark.parametrize("seed", range(2))
def test_any_split_of_any_parameter_is_right(name, seed):
    """Also splits that no plan would ask for: every operator has a rule, or is done on whole values."""
    model, batch, loss = made(name)
    draw = random.Random(f"{name} {seed}")
    degree, splits = draw.choice([2, 4]), {}
    for target, parameter in model.named_parameters():
        dims = [dim for dim, size in enumerate(parameter.shape) if size % degree == 0]
        if dims and draw.random() < 0.6:
            dim = draw.choice(dims)
            size = parameter.shape[dim]
            halves = size % (2 * degree) == 0 and draw.random() < 0.3
            splits[target] = Split(dim, (size // 2, size // 2) if halves else (size,))
    found = compare(model, batch, loss, splits, degree, sequence=draw.random() < 0.4)
    # parts of these models compute in float32, whatever their own dtype
    bound = 1e-5 if name in ("Llama, eager attention", "Gemma2", "Mamba") else BOUND
    assert max(apart for (_, target), apart in found.apart.items() if not target.endswith(("qkv.bias", "key.bias"))) < bound


def test_a_loss_that_is_not_known_is_gathered_and_said():
    model, batch, _ = made("Llama")

    def mean_probability(output, batch):
        return -output.logits.softmax(-1).gather(-1, batch["input_ids"][..., None]).mean()

    splits = dict(sharding_of(model, Mesh(tp=2), 0).splits)
    found = compare(model, batch, mean_probability, splits, 2)
    assert max(found.apart.values()) < BOUND
    assert {(entry.op, entry.num_elements) for entry in found.gathered} == {("aten._softmax.default", B * T * V)}


def test_a_sum_over_ranks_is_told_by_its_layer():
    model, batch, loss = made("GPT")
    splits = dict(sharding_of(model, Mesh(tp=2), 0).splits)
    graph = compare(model, batch, loss, splits, 2).graphs[0]
    tags = [dict(node.kwargs)["tag"] for node in graph.nodes if node.op == "packhorse.tensor_sum.default"]
    assert len(set(tags)) == len(tags)
    blocks = [f"blocks.{k}.{layer}" for k in range(L) for layer in ("attention.out", "feed_forward.out")]
    assert [tag for tag in tags if tag.startswith("g ")] == ["g tokens", *(f"g {layer}" for layer in blocks)]
    read = [f"blocks.{k}.{layer}" for k in range(L) for layer in ("attention.qkv", "feed_forward.up")]
    assert [tag for tag in tags if tag.startswith("f ")] == ["f head", *(f"f {layer}" for layer in reversed(read))]


def test_a_sequence_that_the_degree_does_not_divide_is_refused():
    model, batch, loss = made("GPT")
    splits = dict(sharding_of(model, Mesh(tp=2), 0).splits)
    short = {name: tokens[:, :7] for name, tokens in batch.items()}
    with pytest.raises(
        BatchError, match=r"a sequence of 7 tokens \(dim 1 of a batch \[2, 7\]\) cannot be cut evenly over tp=2 ranks; make it 6 or 8"
    ):
        compare(model, short, loss, splits, 2, sequence=True)
