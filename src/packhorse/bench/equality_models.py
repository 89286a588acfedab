"""The small models that `packhorse bench equality` trains, their batches and losses.

All parts of a batch hold as many samples, and as many labels, as any other: the loss is the mean of the ranks' means. Sizes are no multiples of
anything, so that shards are padded and tensors lie across their borders.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.models.bert import BERT, IGNORED
from packhorse.models.gpt import GPT
from packhorse.models.resnet import resnet

LABELS = 3  # of a sample that has not one for each token
SIDE, CLASSES, CHANNELS = 8, 7, 6

Batch = dict[str, Tensor]
Loss = Callable[[Any, Batch], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Of models of tokens. inner: between the matrices of a gated feed-forward."""

    vocab: int
    width: int
    heads: int
    key_heads: int
    tokens: int
    inner: int = 20


@dataclass(frozen=True)
class Workload:
    """make(layers) -> model. batch(number, generator) -> a micro-batch of `number` samples. loss: where the model's own is not of its dtype."""

    make: Callable[[int], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    loss: Loss | None = None


def _gpt(sizes: Sizes, layers: int) -> nn.Module:
    return GPT(vocab=sizes.vocab, layers=layers, width=sizes.width, heads=sizes.heads, seq_len=sizes.tokens)


def _bert(sizes: Sizes, layers: int) -> nn.Module:
    return BERT(vocab=sizes.vocab, layers=layers, width=sizes.width, heads=sizes.heads, seq_len=sizes.tokens, dropout=0.0)


def _resnet(_: int) -> nn.Module:
    """Group norm where the net has batch norm: what a sample gives does not depend on the other samples of the batch."""
    net = resnet(8, width=CHANNELS, classes=CLASSES)
    for module in [*net.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(2, child.num_features))
    return net


def _settings(sizes: Sizes, tied: bool, layers: int) -> dict[str, Any]:
    """What Llama and Qwen3 are configured by."""
    return {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.width,
        "intermediate_size": sizes.inner,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.key_heads,
        "num_hidden_layers": layers,
        "max_position_embeddings": sizes.tokens,
        "tie_word_embeddings": tied,
        "use_cache": False,
    }


def _llama(sizes: Sizes, tied: bool, layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_settings(sizes, tied, layers)))


def _qwen3(sizes: Sizes, layers: int) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_settings(sizes, True, layers), head_dim=sizes.width // sizes.heads))


def _gpt2(sizes: Sizes, layers: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape: dict[str, Any] = {"n_embd": sizes.width, "n_layer": layers, "n_head": sizes.heads, "n_positions": sizes.tokens}
    without: dict[str, Any] = {
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return GPT2LMHeadModel(GPT2Config(vocab_size=sizes.vocab, **shape, **without))


def _next_tokens(output: Any, batch: Batch) -> Tensor:
    """The loss of a causal model in its own dtype: that of Hugging Face is in float32 always."""
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def _tokens(sizes: Sizes, number: int, draw: torch.Generator) -> Batch:
    return {name: torch.randint(0, sizes.vocab, (number, sizes.tokens), generator=draw) for name in ("ids", "labels")}


def _masked(sizes: Sizes, number: int, draw: torch.Generator) -> Batch:
    batch = _tokens(sizes, number, draw)
    hidden = torch.rand(number, sizes.tokens, generator=draw).argsort(1) < LABELS
    return batch | {"labels": batch["labels"].masked_fill(~hidden, IGNORED)}


def _images(number: int, draw: torch.Generator) -> Batch:
    return {
        "images": torch.randn(number, 3, SIDE, SIDE, generator=draw, dtype=torch.float64),
        "labels": torch.randint(0, CLASSES, (number,), generator=draw),
    }


def _inputs(sizes: Sizes, number: int, draw: torch.Generator) -> Batch:
    return {"input_ids": torch.randint(0, sizes.vocab, (number, sizes.tokens), generator=draw)}


SMALL = Sizes(vocab=37, width=12, heads=2, key_heads=1, tokens=9)
# tp 4 divides the heads and the sequence, is a multiple of the key/value heads, and leaves of the vocabulary 128, 128, 45 and 0 entries
CUT = Sizes(vocab=301, width=24, heads=4, key_heads=2, tokens=12)

WORKLOADS = {
    "GPT": Workload(partial(_gpt, SMALL), partial(_tokens, SMALL)),
    "BERT": Workload(partial(_bert, SMALL), partial(_masked, SMALL)),
    "ResNet, group norm": Workload(_resnet, _images),
    "Llama, tied": Workload(partial(_llama, SMALL, True), partial(_inputs, SMALL), _next_tokens),
    "Llama, untied": Workload(partial(_llama, SMALL, False), partial(_inputs, SMALL), _next_tokens),
}
CUT_WORKLOADS = {
    "GPT, 4 heads": Workload(partial(_gpt, CUT), partial(_tokens, CUT)),
    "BERT, 4 heads": Workload(partial(_bert, CUT), partial(_masked, CUT)),
    "Llama, 4 heads, tied": Workload(partial(_llama, CUT, True), partial(_inputs, CUT), _next_tokens),
    "Llama, 4 heads, untied": Workload(partial(_llama, CUT, False), partial(_inputs, CUT), _next_tokens),
    "Qwen3": Workload(partial(_qwen3, CUT), partial(_inputs, CUT), _next_tokens),
    "GPT-2": Workload(partial(_gpt2, CUT), partial(_inputs, CUT), _next_tokens),
}
WORDS = Sizes(vocab=50257, width=8, heads=4, key_heads=4, tokens=4)
WORDY = "GPT, 50257 tokens"  # GPT-2's vocabulary, which no degree divides
EVERY_WORKLOAD = WORKLOADS | CUT_WORKLOADS | {WORDY: Workload(partial(_gpt, WORDS), partial(_tokens, WORDS))}
