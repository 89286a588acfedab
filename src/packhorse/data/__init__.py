"""Text or tokens on disk -> the batches of a step. No torch."""

from packhorse.data.batches import training_samples, validation_samples
from packhorse.data.corpus import Corpus, load_corpus, needs_tokenizing
from packhorse.data.counting import counting_nats
from packhorse.data.sampling import IGNORED, samples, validation_starts, windows
from packhorse.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "IGNORED",
    "Corpus",
    "Tokenizer",
    "counting_nats",
    "load_corpus",
    "load_tokenizer",
    "needs_tokenizing",
    "samples",
    "training_samples",
    "validation_samples",
    "validation_starts",
    "windows",
]
