"""What a run asks of its model: names, shifted or hidden tokens, and which token hides them."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from packhorse.data import load_corpus
from packhorse.errors import ConfigError
from packhorse.train.build import build_model, training_batch, validation_batches
from packhorse.train.config_file import config_from_dict
from packhorse.train.task import Hiding, hiding_of, named, objective_of, posed, vocab_of

pytestmark = pytest.mark.cpu
transformers = pytest.importorskip("transformers")

DATA = {"seq_len": 40, "micro_batch_size": 2, "global_batch_size": 4}


def settings(texts, data=None, **model):
    return config_from_dict({"run": {"eval_batches": 2, "seed": 5}, "model": model, "data": DATA | {"corpus": str(texts)} | (data or {})})


def tokenizer_file(path, *special):
    words = {token: n for n, token in enumerate([*special, "[UNK]", "to", "be", "or", "not", "line", "that", "is", "it"])}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(list(special))
    made.save(str(path))
    return len(words)


@pytest.fixture
def config_file(tmp_path):
    def make(kind, **changes):
        small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 300}
        made = {"gpt2": transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=300, n_positions=64)}
        made |= {"bert": transformers.BertConfig(**small), "t5": transformers.T5Config(d_model=16, num_layers=1, num_heads=2, vocab_size=300)}
        names = {"gpt2": "GPT2LMHeadModel", "bert": "BertForMaskedLM", "t5": "T5ForConditionalGeneration"}
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps(made[kind].to_dict() | {"architectures": [names[kind]]} | changes))
        return str(path)

    return make


def test_the_objective_of_each_kind(texts, config_file):
    assert objective_of(settings(texts).model) == objective_of(settings(texts, kind="lstm").model) == "causal"
    assert objective_of(settings(texts, kind="bert").model) == "masked"
    assert objective_of(settings(texts, kind="hf", config=config_file("gpt2")).model) == "causal"
    assert objective_of(settings(texts, kind="hf", config=config_file("bert")).model) == "masked"
    assert vocab_of(settings(texts, kind="hf", config=config_file("bert")).model) == 300
    with pytest.raises(ConfigError, match="T5ForConditionalGeneration, which has no loss over plain text"):
        objective_of(settings(texts, kind="hf", config=config_file("t5")).model)


def test_names(texts, config_file):
    ids, labels = torch.zeros(1, 3), torch.ones(1, 3)
    assert named(settings(texts).model, ids, labels) == {"ids": ids, "labels": labels}
    causal = named(settings(texts, kind="hf", config=config_file("gpt2")).model, ids, labels)
    assert causal == {"input_ids": ids, "labels": ids, "shift_labels": labels}
    assert named(settings(texts, kind="hf", config=config_file("bert")).model, ids, labels) == {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_the_loss_of_a_batch_is_the_mean_over_the_tokens_asked_for(texts, config_file, kind):
    config = settings(texts, kind="hf", config=config_file(kind))
    model = build_model(config).eval()
    for batch in [*training_batch(config, load_corpus(str(texts)), 3), *(batch for batch, _ in validation_batches(config, load_corpus(str(texts))))]:
        output = model(**batch)
        targets = batch["labels" if kind == "bert" else "shift_labels"]
        asked = targets != -100
        assert asked.sum() == (2 * 6 if kind == "bert" else 2 * 40)
        picked = output.logits.double().log_softmax(-1)[asked].gather(-1, targets[asked][:, None])
        assert output.loss.item() == pytest.approx(-picked.mean().item(), rel=1e-6)


def test_hidden_tokens_are_those_of_the_text_and_do_not_depend_on_the_cut(texts):
    corpus = load_corpus(str(texts))
    config = settings(texts, kind="bert")
    whole = settings(texts, {"micro_batch_size": 4}, kind="bert")
    one, parts = training_batch(whole, corpus, 3), training_batch(config, corpus, 3)
    assert all(torch.equal(one[key], torch.cat([part[key] for part in parts])) for key in ("ids", "labels"))
    plain = training_batch(settings(texts, {"micro_batch_size": 4}), corpus, 3)["ids"]
    asked = one["labels"] != -100
    assert torch.equal(one["labels"][asked], plain[asked]) and torch.equal(one["ids"][~asked], plain[~asked])
    assert (one["ids"] == 256).any() and one["ids"].max() == 256  # the number beyond the bytes
    assert not torch.equal(training_batch(whole, corpus, 4)["labels"] != -100, asked)


def test_the_mask_token(texts, tmp_path):
    path = tmp_path / "tokenizer.json"
    model = settings(texts, kind="bert", vocab=300).model
    assert hiding_of(model, "bytes") == Hiding(256, 256)
    size = tokenizer_file(path, "[PAD]", "[MASK]")
    assert hiding_of(model, str(path)) == Hiding(1, size)
    other = tmp_path / "other.json"
    size = tokenizer_file(other)
    assert hiding_of(model, str(other)) == Hiding(size, size)
    with pytest.raises(ConfigError, match=r"has no mask token .* set model.vocab .* to 257 or more"):
        hiding_of(settings(texts, kind="bert", vocab=256).model, "bytes")


def test_files_of_tokens_need_a_tokenizer_to_be_hidden(texts, tmp_path):
    np.arange(4000, dtype=np.uint16).__mod__(200).tofile(tmp_path / "tokens.bin")
    corpus = load_corpus(str(tmp_path / "tokens.bin"))
    config = settings(tmp_path / "tokens.bin", kind="bert")
    ids = np.zeros((1, 4), np.int64)
    with pytest.raises(ConfigError, match=r"set data\.tokenizer to the tokenizer"):
        posed(config, corpus, ids, ids, first=0)
