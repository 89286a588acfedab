"""What a model is asked for in training, and under which names it takes a batch.

B samples, T tokens of a sample.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from packhorse.data import Corpus, load_tokenizer
from packhorse.data.masking import hide
from packhorse.data.sampling import Ids
from packhorse.data.tokenizer import BYTES, HuggingFace
from packhorse.errors import ConfigError
from packhorse.train.config import Config, ModelConfig

if TYPE_CHECKING:
    from packhorse.models.hf import Source  # imports the library transformers, which takes seconds

_MASK_NAMES = ("[MASK]", "<mask>", "<|mask|>")


@dataclass(frozen=True)
class Hiding:
    """The number of the token that hides others, and how many tokens a random one is drawn from."""

    mask_token: int
    vocab: int


def source_of(options: ModelConfig) -> "Source":
    """What the config.json of model.kind "hf" says. Raises ConfigError as `packhorse.models.hf.read_source`."""
    from packhorse.models import hf

    assert options.config is not None
    return hf.read_source(Path(options.config).expanduser(), options.objective)


def vocab_of(options: ModelConfig) -> int | None:
    """How many tokens the model knows; None where its config.json does not say. Builds no model."""
    return options.vocab if options.kind != "hf" else getattr(source_of(options).config.get_text_config(), "vocab_size", None)


@cache  # asked at every step; a file is read once a process
def objective_of(options: ModelConfig) -> Literal["causal", "masked"]:
    """What the model is trained for. Raises ConfigError if its config.json names a class that has no loss over plain text."""
    if options.kind != "hf":
        return "masked" if options.kind == "bert" else "causal"
    source = source_of(options)
    if source.objective == "causal" or source.objective == "masked":
        return source.objective
    raise ConfigError(
        f"{source.path} is for {source.model_class.__name__}, which has no loss over plain text; set model.objective to 'causal' or 'masked' "
        "where the architecture has that, or train it from Python, where packhorse.plan takes any batch and any loss"
    )


def named(options: ModelConfig, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """ids (B, T) and what to predict at each place, labels (B, T), -100 where nothing is, under the names of the model's arguments.

    The loss is the mean over the places that have a label: T targets a sample for "causal", the hidden ones for "masked".
    """
    if options.kind != "hf":
        return {"ids": ids, "labels": labels}
    if objective_of(options) == "masked":
        return {"input_ids": ids, "labels": labels}
    # The library shifts `labels` by itself, and would lose the last target; with `shift_labels` it does not look at them.
    return {"input_ids": ids, "labels": ids, "shift_labels": labels}


def posed(config: Config, corpus: Corpus, ids: Ids, labels: Ids, *, first: int, validation: bool = False) -> dict[str, Tensor]:
    """Samples [first, first + B) of the corpus, ids (B, T) and the next tokens, labels (B, T)  ->  what the model is given.

    Raises ConfigError if tokens are to be hidden and there is none to hide them with.
    """
    if objective_of(config.model) == "masked":
        if corpus.unit == "token" and config.data.tokenizer == BYTES:
            raise ConfigError(
                "hiding tokens (model.objective 'masked') needs to know which token hides the others, and files of tokens do not say; "
                "set data.tokenizer to the tokenizer that they were made with"
            )
        hiding = hiding_of(config.model, config.data.tokenizer)
        ids, labels = hide(ids, labels, seed=config.run.seed, first=first, mask_token=hiding.mask_token, vocab=hiding.vocab, validation=validation)
    return named(config.model, torch.from_numpy(ids), torch.from_numpy(labels))


@cache  # asked at every step; a tokenizer is read once a process
def hiding_of(options: ModelConfig, tokenizer: str) -> Hiding:
    """The tokenizer's own mask token, or the first number beyond its tokens. Raises ConfigError if the model has no room for that."""
    loaded, vocab = load_tokenizer(tokenizer), vocab_of(options)
    if isinstance(loaded, HuggingFace):
        for name in _MASK_NAMES:
            if (number := loaded.library.token_to_id(name)) is not None:
                return Hiding(number, loaded.vocab)
    if vocab is not None and loaded.vocab >= vocab:
        raise ConfigError(
            f"data.tokenizer = {tokenizer!r} has no mask token ({', '.join(_MASK_NAMES)}), and the model's vocabulary of {vocab} has none beyond "
            f"its {loaded.vocab} tokens to hide them with; set model.vocab (or vocab_size in the config.json) to {loaded.vocab + 1} or more"
        )
    return Hiding(loaded.vocab, loaded.vocab)
