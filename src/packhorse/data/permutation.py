"""A shuffle of [0, n) that is computed, not stored: where index i goes is a function of (key, i), at the cost of a few multiplications.

A Feistel network over a domain a x b that just holds n: a number is the pair (left, right), and each round adds to one half a hash of the
other, which can be undone whatever the hash; so it is a permutation of a * b numbers. What falls outside [0, n) is sent through again
until it falls inside ("cycle walking"), which leaves a permutation of [0, n). As a * b - n < a, with a about the root of n, that is rare.
Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", sections 3 (cycle walking) and 5 (generalized Feistel).
"""

import math

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

ROUNDS = 12


def round_keys(seed: int, epoch: int) -> Words:
    """(seed, epoch) -> the keys (ROUNDS,) of a shuffle, drawn from the counter-based generator Philox (Salmon et al. 2011)."""
    # The second word of the key sets these draws apart: sample starts have 0 there, hidden tokens 1 and 2.
    return np.random.Philox(key=[seed, 3], counter=[0, 0, 0, epoch]).random_raw(ROUNDS)


def permuted(indices: Ids, size: int, keys: Words) -> Ids:
    """Where the shuffle with `keys` of [0, size) sends `indices` (B,)  ->  (B,). Work and memory grow with B, not with size."""
    left = math.isqrt(size - 1) + 1
    right = -(-size // left)
    found = indices.astype(np.uint64)
    outside = np.arange(len(found))
    while len(outside):
        found[outside] = _feistel(found[outside], np.uint64(left), np.uint64(right), keys)
        outside = outside[found[outside] >= size]
    return found.astype(np.int64)


def _feistel(numbers: Words, a: np.uint64, b: np.uint64, keys: Words) -> Words:
    """A permutation of [0, a * b), element by element."""
    left, right = numbers % a, numbers // a
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        left = (left + _hash(right ^ even) % a) % a
        right = (right + _hash(left ^ odd) % b) % b
    return left + a * right


def _hash(words: Words) -> Words:
    """Each bit of a word changes about half of the result's bits. Source: the finalizer of SplitMix64, Steele et al. 2014, section 5."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
