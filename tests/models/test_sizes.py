"""Parameters of a model on meta against the closed form, and both against what the sources call the size."""

import pytest
import torch

from packhorse.errors import ConfigError
from packhorse.models.bert import bert
from packhorse.models.gpt import gpt
from packhorse.models.sizes import BERT_SIZES, GPT_SIZES, find_size

pytestmark = pytest.mark.cpu

# OpenAI's own counts of GPT-2 (the paper's 117M and 345M were corrected later), Megatron's table 1 to the stated rounding
COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}
BILLIONS = {"megatron-1.2b": 1.2, "megatron-2.5b": 2.5, "megatron-4.2b": 4.2, "megatron-8.3b": 8.3, "turing-17b": 17}


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl", "megatron-8.3b", "zero-170b", "megatron-1t"])
def test_a_gpt_on_meta_has_the_parameters_of_the_closed_form(name):
    size = GPT_SIZES[name]
    with torch.device("meta"):
        model = gpt(size)
    D = size.width
    assert count(model) == size.layers * (12 * D * D + 13 * D) + (size.vocab + size.seq_len + 2) * D
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("name", COUNTS)
def test_gpt2_has_the_published_number_of_parameters(name):
    size = GPT_SIZES[name]
    assert size.layers * (12 * size.width**2 + 13 * size.width) + (size.vocab + size.seq_len + 2) * size.width == COUNTS[name]


@pytest.mark.parametrize("name", BILLIONS)
def test_the_sizes_of_megatron_round_to_their_names(name):
    size = GPT_SIZES[name]
    total = size.layers * (12 * size.width**2 + 13 * size.width) + (size.vocab + size.seq_len + 2) * size.width
    assert round(total / 1e9, 0 if BILLIONS[name] > 10 else 1) == BILLIONS[name]


@pytest.mark.parametrize("name", [name for name in GPT_SIZES if name.startswith("zero-")])
def test_the_sizes_of_zero_are_twelve_layers_width_squared(name):
    size = GPT_SIZES[name]
    label = float(name.removesuffix("b").rpartition("-")[2])
    assert 12 * size.layers * size.width**2 == pytest.approx(label * 1e9, rel=0.09)  # 1.16b, a count of all parameters, is the farthest
    assert size.width % size.heads == 0


@pytest.mark.parametrize("name", BERT_SIZES)
def test_a_bert_on_meta_has_the_parameters_of_the_closed_form(name):
    size = BERT_SIZES[name]
    with torch.device("meta"):
        model = bert(size)
    D, V = size.width, size.vocab
    embeddings = (V + size.seq_len + 2) * D + 2 * D  # tokens, positions, segments; one norm here or behind the last block
    head = D * D + D + 2 * D + V  # a linear layer, a norm, a bias; the matrix is that of the tokens
    assert count(model) == embeddings + size.layers * (12 * D * D + 13 * D) + head


def test_bert_large_is_the_published_336_million_less_the_second_task():
    size = BERT_SIZES["bert-large"]
    with torch.device("meta"):
        model = bert(size)
    pooler, next_sentence = size.width**2 + size.width, 2 * size.width + 2
    assert count(model) + pooler + next_sentence == 336_226_108  # of Google's checkpoint


def test_an_unknown_size_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean gpt2-xl"):
        find_size("gpt", "gpt2xl")
    for name in ("bert-large", "BERT-larg"):
        with pytest.raises(ConfigError, match=r"bert-large is a size of model\.kind = 'bert'; set that\. Known: gpt2,"):
            find_size("gpt", name)
    with pytest.raises(ConfigError, match=r"Known: bert-base, bert-large"):
        find_size("bert", "huge")
    with pytest.raises(ConfigError, match=r"model.kind = 'lstm' has none"):
        find_size("lstm", "gpt2")
