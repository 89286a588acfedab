"""What `packhorse bench equality` compares: small models, and how each is trained. A case is one model, trained in one way on one number of ranks.

All parts of a batch hold as many samples, and as many labels, as any other: the loss is the mean of the ranks' means. Sizes are no multiples of
anything, so that shards are padded and tensors lie across their borders.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.models.bert import BERT, IGNORED
from packhorse.models.gpt import GPT
from packhorse.models.resnet import resnet

VOCAB, WIDTH, LAYERS, HEADS, TOKENS = 37, 12, 2, 2, 9
SAMPLES, LABELS = 2, 3  # of each micro-batch of a rank; labels of a sample
SIDE, CLASSES, CHANNELS = 8, 7, 6
BUDGET = "96%"  # of what a step takes that keeps everything: most of it are states of the model, which no recomputation frees

Batch = dict[str, Tensor]
Loss = Callable[[Any, Batch], Tensor]


@dataclass(frozen=True)
class Case:
    """One way to train one model for some steps. recompute: optimal, within BUDGET. dtype: of everything."""

    model: str
    dp: int
    stage: int
    micros: int
    clip: bool
    recompute: bool
    dtype: str = "float64"


@dataclass(frozen=True)
class Workload:
    """make() -> model. batch(number, generator) -> a micro-batch of `number` samples. loss: where the model's own is not of its dtype."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    loss: Loss | None = None


def _gpt() -> nn.Module:
    return GPT(vocab=VOCAB, layers=LAYERS, width=WIDTH, heads=HEADS, seq_len=TOKENS)


def _bert() -> nn.Module:
    return BERT(vocab=VOCAB, layers=LAYERS, width=WIDTH, heads=HEADS, seq_len=TOKENS, dropout=0.0)


def _resnet() -> nn.Module:
    """Group norm where the net has batch norm: what a sample gives does not depend on the other samples of the batch."""
    net = resnet(8, width=CHANNELS, classes=CLASSES)
    for module in [*net.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(2, child.num_features))
    return net


def _llama(tied: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes: dict[str, Any] = {
            "hidden_size": WIDTH,
            "intermediate_size": 20,
            "num_attention_heads": HEADS,
            "num_key_value_heads": 1,
            "num_hidden_layers": LAYERS,
        }
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=TOKENS, tie_word_embeddings=tied, use_cache=False, **sizes))

    return make


def _next_tokens(output: Any, batch: Batch) -> Tensor:
    """The loss of a causal model in its own dtype: that of Hugging Face is in float32 always."""
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def _tokens(number: int, draw: torch.Generator) -> Batch:
    return {name: torch.randint(0, VOCAB, (number, TOKENS), generator=draw) for name in ("ids", "labels")}


def _masked(number: int, draw: torch.Generator) -> Batch:
    batch = _tokens(number, draw)
    hidden = torch.rand(number, TOKENS, generator=draw).argsort(1) < LABELS
    return batch | {"labels": batch["labels"].masked_fill(~hidden, IGNORED)}


def _images(number: int, draw: torch.Generator) -> Batch:
    return {
        "images": torch.randn(number, 3, SIDE, SIDE, generator=draw, dtype=torch.float64),
        "labels": torch.randint(0, CLASSES, (number,), generator=draw),
    }


def _inputs(number: int, draw: torch.Generator) -> Batch:
    return {"input_ids": torch.randint(0, VOCAB, (number, TOKENS), generator=draw)}


WORKLOADS = {
    "GPT": Workload(_gpt, _tokens),
    "BERT": Workload(_bert, _masked),
    "ResNet, group norm": Workload(_resnet, _images),
    "Llama, tied": Workload(_llama(True), _inputs, _next_tokens),
    "Llama, untied": Workload(_llama(False), _inputs, _next_tokens),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "model": tuple(WORKLOADS),
    "dp": (1, 2, 3, 4),
    "stage": (0, 1, 2, 3),
    "micros": (1, 3),
    "clip": (False, True),
    "recompute": (False, True),
}


def every_case(dtype: str = "float64") -> list[Case]:
    """The full matrix."""
    return [Case(**dict(zip(FACTORS, values)), dtype=dtype) for values in itertools.product(*FACTORS.values())]


def start(case: Case) -> tuple[nn.Module, Workload]:
    """The model with its starting weights: large enough that every gradient counts."""
    torch.manual_seed(3)
    workload = WORKLOADS[case.model]
    model = workload.make().to(getattr(torch, case.dtype)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model, workload


def micro_batches(case: Case, step: int) -> list[list[Batch]]:
    """[rank][micro-batch] of a step."""
    workload = WORKLOADS[case.model]
    draw = torch.Generator().manual_seed(100 + step)
    parts = [[workload.batch(SAMPLES, draw) for _ in range(case.micros)] for _ in range(case.dp)]
    dtype = getattr(torch, case.dtype)
    return [[{k: t.to(dtype) if t.is_floating_point() else t for k, t in micro.items()} for micro in micros] for micros in parts]


def whole_batch(case: Case, step: int) -> Batch:
    """All of a step's micro-batches of all ranks as one batch."""
    parts = [micro for micros in micro_batches(case, step) for micro in micros]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
