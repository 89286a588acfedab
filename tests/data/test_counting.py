import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.data.corpus import load_corpus
from packhorse.data.counting import counting_nats

pytestmark = pytest.mark.pure


def as_bytes(text):
    return np.frombuffer(text if isinstance(text, bytes) else text.encode(), dtype=np.uint8)


def test_orders_0_and_1_by_hand():
    train, text, s = as_bytes("abab"), as_bytes("ab"), 2.0
    a0 = (2 + s / 256) / (4 + s)  # "a" is 2 of 4 bytes
    b0 = (2 + s / 256) / (4 + s)
    assert np.allclose(counting_nats(train, text, 0, s), [-math.log(a0), -math.log(b0)], rtol=1e-12)
    # After "a" comes "b" both times; the first byte has no context and falls back to order 0.
    b1 = (2 + s * b0) / (2 + s)
    assert np.allclose(counting_nats(train, text, 1, s), [-math.log(a0), -math.log(b1)], rtol=1e-12)


def test_unseen_context_is_the_lower_order():
    train = as_bytes("aaaa")
    lower = counting_nats(train, as_bytes("zza"), 0, 1.0)
    assert np.allclose(counting_nats(train, as_bytes("zza"), 2, 1.0), lower)


def slow_nats(train: bytes, text: bytes, order: int, s: float):
    """The same formula, byte by byte with dictionaries."""

    def p(context: bytes, byte: int) -> float:
        runs = Counter(train[i : i + len(context) + 1] for i in range(len(train) - len(context)))
        lower = p(context[1:], byte) if context else 1 / 256
        total = sum(n for run, n in runs.items() if run[:-1] == context)
        return (runs[context + bytes([byte])] + s * lower) / (total + s)

    return [-math.log(p(text[max(0, i - order) : i], text[i])) for i in range(len(text))]


@settings(deadline=None)
@given(st.binary(max_size=30), st.binary(max_size=8), st.integers(0, 3), st.sampled_from([0.5, 4.0]))
def test_equals_a_dictionary(train, text, order, strength):
    assert np.allclose(counting_nats(as_bytes(train), as_bytes(text), order, strength), slow_nats(train, text, order, strength))


@settings(deadline=None, max_examples=20)
@given(st.text("ab\xff", max_size=30), st.text("ab", max_size=3), st.integers(0, 3))
def test_probabilities_of_the_next_byte_sum_to_one(train, context, order):
    total = sum(math.exp(-counting_nats(as_bytes(train), as_bytes(context.encode() + bytes([byte])), order)[-1]) for byte in range(256))
    assert math.isclose(total, 1.0, rel_tol=1e-9)


def test_the_standard_library_gives_the_published_figures():
    corpus = load_corpus("stdlib")
    nats = [counting_nats(corpus.train, corpus.validation, order).mean() for order in (1, 2, 3)]
    # From the project's statement of its goals; the library differs a little between Python versions.
    assert nats == pytest.approx([2.48, 1.89, 1.57], abs=0.08)
