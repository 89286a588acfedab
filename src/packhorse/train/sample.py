"""A run -> text: its model continues a prompt, one token at a time.

Every token runs the model over the whole window again: simple, and right for any model that gives logits. T tokens of the window, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from packhorse.checkpoint import newest_checkpoint
from packhorse.checkpoint.layout import step_of
from packhorse.checkpoint.model import load_model
from packhorse.data.token_file import SUFFIX
from packhorse.data.tokenized import TRAIN
from packhorse.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from packhorse.errors import CheckpointError, ConfigError, UserError
from packhorse.train.build import build_model
from packhorse.train.config import Config
from packhorse.train.config_file import load_config
from packhorse.train.run_folder import RunFolder
from packhorse.train.task import objective_of, vocab_of


@dataclass(frozen=True)
class Writer:
    """A trained model in eval mode, with the tokenizer of its run. It knows tokens below `vocab` and sees `window` of them at once.

    `checkpoint` is where its parameters come from.
    """

    model: nn.Module
    tokenizer: Tokenizer
    window: int
    vocab: int | None
    checkpoint: Path

    @property
    def step(self) -> int | None:
        return step_of(self.checkpoint)


def load_writer(run: Path, *, checkpoint: Path | None, overrides: list[str], say: Callable[[str], None]) -> Writer:
    """The model of the run folder `run` at `checkpoint`, by default its newest whole one. Reads parameters and buffers only.

    Raises ConfigError for a model that does not predict the next token, CheckpointError if there is no whole checkpoint or it does not fit.
    """
    folder = RunFolder(run)
    if not folder.config.exists():
        raise ConfigError(f"{run} is not the folder of a run: it has no {folder.config.name}; give the run.dir of one")
    config = load_config(folder.config, overrides)
    _require_causal(config)
    tokenizer = _tokenizer(config)
    found = checkpoint or newest_checkpoint(folder.checkpoints, say)
    if found is None:
        raise CheckpointError(f"there is no whole checkpoint in {folder.checkpoints}; train the run first, or give one with --checkpoint")
    model = build_model(replace(config, model=replace(config.model, weights=None)))  # those it started from are of no use any more
    load_model(model, found)
    return Writer(model.eval(), tokenizer, config.data.seq_len, vocab_of(config.model), found)


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Tokens (1, T) -> logits (V,) of the token after the last. A model of packhorse.models gives its loss alone, so its `head` is listened to."""
    if hasattr(model, "get_output_embeddings"):  # of Hugging Face
        return model(input_ids=ids).logits[0, -1]
    heard: list[Tensor] = []
    with model.get_submodule("head").register_forward_hook(lambda module, inputs, output: heard.append(output)):
        model(ids=ids, labels=ids)
    return heard[0][0, -1]


def write(writer: Writer, prompt: str, *, tokens: int, temperature: float = 1.0, top_k: int | None = None, seed: int = 1) -> Iterator[str]:
    """Continues `prompt` by at most `tokens` tokens; gives the prompt, then piece by piece the text that is complete.

    Each token is drawn from softmax(logits / temperature), over the `top_k` likeliest only where that is given; temperature 0 takes the
    likeliest. Ends early at the tokenizer's end of text. The window slides: the model sees the last `writer.window` tokens. The same arguments
    give the same text, on one machine with the same number of threads.
    Raises UserError if an argument is out of range, or the prompt is empty or has tokens that the model does not know.
    """
    if tokens < 1 or not 0 <= temperature < float("inf") or (top_k is not None and top_k < 1):
        raise UserError(
            f"cannot sample {tokens} tokens at temperature {temperature}{'' if top_k is None else f' with top-k {top_k}'}; "
            "expected at least one token, a temperature of 0 or more, and a top-k of 1 or more"
        )
    ids = writer.tokenizer.encode([prompt])[0]
    if not ids:
        raise UserError("the prompt is empty, and a model continues what it is given; give it a few words with --prompt")
    if unknown := next((token for token in ids if writer.vocab is not None and token >= writer.vocab), None):
        raise UserError(
            f"the prompt has the token {unknown} ({writer.tokenizer.decode([unknown])!r}), and the model of this run knows those below "
            f"{writer.vocab}; write the prompt without it"
        )
    return _pieces(writer, ids, tokens, temperature, top_k, torch.Generator().manual_seed(seed))


def printable(text: str) -> str:
    """The text with U+FFFD for control characters, which a model may well produce and which would change the terminal; lines and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def _pieces(writer: Writer, ids: list[int], tokens: int, temperature: float, top_k: int | None, generator: torch.Generator) -> Iterator[str]:
    shown = writer.tokenizer.decode(ids)
    yield shown
    for count in range(1, tokens + 1):
        with torch.no_grad():
            scores = logits(writer.model, torch.tensor([ids[-writer.window :]])).float()
        # Rows of the embedding beyond the tokenizer's tokens are padding.
        token = _draw(scores[: writer.tokenizer.vocab], temperature, top_k, generator)
        if token == writer.tokenizer.end_of_text:
            break
        ids = [*ids, token]
        text = writer.tokenizer.decode(ids)
        # A character of several tokens is complete with the last of them.
        if count == tokens or not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text


def _draw(scores: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(scores.argmax())
    if top_k is not None and top_k < len(scores):
        scores = scores.masked_fill(scores < scores.topk(top_k).values[-1], float("-inf"))
    return int(torch.multinomial(((scores - scores.max()) / temperature).softmax(0), 1, generator=generator))


def _require_causal(config: Config) -> None:
    if objective_of(config.model) != "causal":
        raise ConfigError(
            f"the model of this run (model.kind = {config.model.kind!r}) fills in hidden tokens instead of predicting the next one, so it cannot "
            "continue a text; sample from a run of a causal model (kind gpt, lstm, or hf with objective causal)"
        )


def _tokenizer(config: Config) -> Tokenizer:
    name, corpus, vocab = config.data.tokenizer, Path(config.data.corpus).expanduser(), vocab_of(config.model)
    of_numbers = corpus.suffix == SUFFIX or (corpus / TRAIN).exists()
    if name == BYTES and of_numbers and vocab is not None and vocab > 256:
        raise ConfigError(
            f"this run was trained on the token numbers of {config.data.corpus}, and nothing says what text they stand for; "
            "give the tokenizer they were made with: --set data.tokenizer=TOKENIZER.JSON"
        )
    return load_tokenizer(name)
