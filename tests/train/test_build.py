"""A plan on meta is the plan of the run; each kind of model is built as [model] says."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import packhorse
from packhorse.data import load_corpus
from packhorse.errors import ConfigError
from packhorse.models.bert import BERT
from packhorse.models.gpt import GPT
from packhorse.models.lstm import LSTM
from packhorse.train.build import build_model, build_optimizer, build_plan, model_vocab, seed_of_rank, training_batch, validation_batches
from packhorse.train.config_file import config_from_dict

pytestmark = pytest.mark.cpu

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 100}


def settings(optimizer=None, seq_len=8, **model):
    return config_from_dict(
        {
            "model": model,
            "data": {"seq_len": seq_len, "micro_batch_size": 2, "global_batch_size": 4},
            "optimizer": {"clip_norm": 1.0} | (optimizer or {}),
        }
    )


def plans(config):
    found = []
    for device in ("cpu", "meta"):
        model = build_model(config, device)
        optimizer = build_optimizer(config, model)
        assert [group["fused"] for group in optimizer.param_groups] == [config.optimizer.fused] * 2
        found.append(build_plan(config, packhorse, model, optimizer).to_dict())
    return found


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_model_without_memory_is_planned_alike(kind):
    one, other = plans(settings({"kind": kind}, layers=1, width=16, heads=2))
    assert one == other


@pytest.mark.parametrize("model", [{"kind": "bert", "heads": 2}, {"kind": "lstm"}])
def test_other_kinds_without_memory_are_planned_alike(model):
    one, other = plans(settings(layers=1, width=16, seq_len=3, **model))
    assert one == other


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM"])
def test_a_hugging_face_model_without_memory_is_planned_alike(name, tmp_path):
    t = pytest.importorskip("transformers")
    configs = {"LlamaForCausalLM": t.LlamaConfig, "GPT2LMHeadModel": t.GPT2Config, "BertForMaskedLM": t.BertConfig}
    small = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 100} if name == "GPT2LMHeadModel" else SMALL
    (tmp_path / "config.json").write_text(json.dumps(configs[name](**small).to_dict() | {"architectures": [name]}))
    one, other = plans(settings(kind="hf", config=str(tmp_path)))
    assert one == other


def test_each_kind_is_built_as_it_says():
    bert = build_model(settings(kind="bert", layers=3, width=16, heads=2))
    assert isinstance(bert, BERT) and len(bert.blocks) == 3 and bert.positions.num_embeddings == 8 and bert.dropout.p == 0.1
    lstm = build_model(settings(kind="lstm", layers=3, width=16))
    assert isinstance(lstm, LSTM) and len(lstm.body.cells) == 3 and lstm.tokens.num_embeddings == 256
    xl = build_model(settings(size="gpt2-xl"), "meta")
    assert isinstance(xl, GPT) and sum(p.numel() for p in xl.parameters()) == 1_557_611_200 - (1024 - 8) * 1600  # 8 positions instead of 1024
    assert model_vocab(settings(size="gpt2-xl")) == 50257 and model_vocab(settings(size="gpt2-xl", vocab=256)) == 256
    assert build_model(settings(kind="bert", size="megatron-bert-336m"), "meta").pre_norm
    assert not build_model(settings(kind="bert", size="bert-base"), "meta").pre_norm


@pytest.mark.parametrize(
    "model,text",
    [
        ({"size": "gpt2xl"}, "did you mean gpt2-xl"),
        ({"size": "gpt2", "layers": 3}, "model.size = 'gpt2' has layers 12, and model.layers is 3"),
        ({"kind": "lstm", "heads": 4}, "model.heads means nothing for model.kind = 'lstm'"),
        ({"kind": "lstm", "size": "gpt2"}, "model.kind = 'lstm' has none"),
        ({"kind": "hf"}, "needs model.config"),
        ({"kind": "hf", "config": "x", "width": 8}, "model.width means nothing for model.kind = 'hf'"),
        ({"weights": "x"}, "model.weights means nothing for model.kind = 'gpt'"),
        ({"objective": "masked"}, "model.objective = 'masked' does not go with model.kind = 'gpt'"),
        ({"kind": "bert", "objective": "causal"}, "expected auto or masked"),
        ({"width": 10}, "model.width = 10 is not a multiple of model.heads = 4"),
    ],
)
def test_keys_that_do_not_go_together(model, text):
    with pytest.raises(ConfigError, match=text):
        settings(**model)


def test_a_hugging_face_model_that_cannot_be_trained_as_asked(tmp_path):
    t = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(
        json.dumps(t.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=100, n_positions=7).to_dict() | {"architectures": ["GPT2LMHeadModel"]})
    )
    with pytest.raises(ConfigError, match=r"data.seq_len = 8, and the model of .* has 7 positions"):
        build_model(settings(kind="hf", config=str(tmp_path)))
    small = t.XLNetConfig(d_model=16, n_layer=1, n_head=2, d_inner=16, vocab_size=100)
    (tmp_path / "config.json").write_text(json.dumps(small.to_dict() | {"architectures": ["XLNetLMHeadModel"]}))
    with pytest.raises(ConfigError, match="XLNetLMHeadModel takes no targets that are shifted already"):
        build_model(settings(kind="hf", config=str(tmp_path)))


def test_weights_are_drawn_from_the_seed_of_the_run(tmp_path):
    t = pytest.importorskip("transformers")
    config = t.LlamaConfig(**SMALL)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}))
    ours = build_model(settings(kind="hf", config=str(tmp_path)))
    torch.manual_seed(1)  # the default of run.seed
    theirs = t.AutoModelForCausalLM.from_config(config)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters()))


def spread_over(dp, eval_batches=8):
    given = {"run": {"eval_batches": eval_batches}, "data": {"seq_len": 8, "micro_batch_size": 2, "global_batch_size": 24}, "mesh": {"dp": dp}}
    return config_from_dict(given)


@pytest.mark.parametrize("dp", [2, 3, 12])
def test_ranks_are_dealt_the_micro_batches_of_one(texts, dp):
    """Micro-batch m of rank r is number m dp + r of those that one rank has."""
    corpus = load_corpus(str(texts))
    whole = training_batch(spread_over(1), corpus, 5)
    assert len(whole) == 12
    for rank in range(dp):
        dealt = training_batch(spread_over(dp), corpus, 5, rank)
        dealt = dealt if isinstance(dealt, list) else [dealt]
        assert len(dealt) == 12 // dp
        for micro, batch in enumerate(dealt):
            assert all(torch.equal(batch[name], whole[micro * dp + rank][name]) for name in ("ids", "labels"))


def test_tp_ranks_of_one_group_have_the_same_batches(texts):
    """Ranks 2 and 3 of dp 2 x tp 2 are dp rank 1; the micro-batches of a step are those of two ranks without tp."""
    corpus, two = load_corpus(str(texts)), spread_over(2)
    four = replace(two, mesh=replace(two.mesh, tp=2))
    assert four.num_micro_batches == two.num_micro_batches == 6
    for rank in range(4):
        asked, wanted = training_batch(four, corpus, 3, rank), training_batch(two, corpus, 3, rank // 2)
        assert len(asked) == 6 and all(torch.equal(one[name], other[name]) for one, other in zip(asked, wanted, strict=True) for name in one)
        asked, wanted = validation_batches(four, corpus, rank), validation_batches(two, corpus, rank // 2)
        assert [weight for _, weight in asked] == [weight for _, weight in wanted] == [2] * 4
        assert all(torch.equal(one["ids"], other["ids"]) for (one, _), (other, _) in zip(asked, wanted, strict=True))


def test_the_plan_is_asked_for_with_the_settings_of_the_mesh():
    asked = {}
    engine = SimpleNamespace(plan=lambda model, batch, **options: asked.update(options))
    mesh = {"tp": 2, "sequence_parallel": True, "zero_stage": 1, "tensor_plan": {"blocks.*.attention.out": "row", "qkv": ["column", 3]}}
    build_plan(config_from_dict({"mesh": mesh}), engine, None, None, 1)
    expected = {"mesh": packhorse.Mesh(dp=1, tp=2), "rank": 1, "zero_stage": 1, "tensor_plan": mesh["tensor_plan"], "sequence_parallel": True}
    assert {name: asked[name] for name in expected} == expected
    build_plan(config_from_dict({"mesh": {"tp": 2}}), engine, None, None)
    assert asked["tensor_plan"] is None and not asked["sequence_parallel"]


def test_the_plan_is_asked_for_with_the_settings_of_memory():
    asked = {}
    engine = SimpleNamespace(plan=lambda model, batch, **options: asked.update(options))
    memory = {"recompute": "blocks", "budget": "70%", "residency": "offload", "host_budget": "1GiB"}
    build_plan(config_from_dict({"memory": memory}), engine, None, None)
    assert {name: asked[name] for name in memory} == memory
    build_plan(config_from_dict({}), engine, None, None)
    assert (asked["residency"], asked["host_budget"]) == ("auto", None)


@pytest.mark.parametrize(("dp", "eval_batches"), [(1, 5), (2, 4), (2, 5), (3, 5), (4, 3)])
def test_the_mean_over_ranks_of_validation_is_the_mean_over_all_batches(texts, dp, eval_batches):
    corpus = load_corpus(str(texts))
    whole = [batch["ids"].double().mean() for batch, _ in validation_batches(spread_over(1, eval_batches), corpus)]
    shares = [validation_batches(spread_over(dp, eval_batches), corpus, rank) for rank in range(dp)]
    assert len(whole) == eval_batches and len({len(share) for share in shares}) == 1
    total = 0.0
    for at_once in zip(*shares, strict=True):
        (weight,) = {weight for _, weight in at_once}
        total += weight * sum(batch["ids"].double().mean().item() for batch, _ in at_once) / dp
    assert total / eval_batches == pytest.approx(sum(whole).item() / eval_batches, rel=1e-12)


def test_seeds_of_ranks_are_their_own():
    seeds = {seed_of_rank(seed, rank) for seed in range(20) for rank in range(20)}
    assert len(seeds) == 400 and all(0 <= seed < 2**63 for seed in seeds)
