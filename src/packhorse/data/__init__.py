"""Text on disk -> the batches of a step. No torch."""

from packhorse.data.corpus import Corpus, load_corpus
from packhorse.data.counting import counting_nats
from packhorse.data.sampling import sample_micro_batch, validation_starts, windows

__all__ = ["Corpus", "counting_nats", "load_corpus", "sample_micro_batch", "validation_starts", "windows"]
