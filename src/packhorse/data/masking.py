"""Hides tokens for a model that has to find them again (masked language model). A pure function of (seed, number of the sample).

B samples, T tokens of a sample. Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1: of 15 % of the tokens 80 % become the mask token,
10 % another token, and 10 % stay; the model is asked for all of them.
"""

import numpy as np

from packhorse.data.sampling import IGNORED, Ids

SHARE = 0.15
_MASKED, _CHANGED = 0.8, 0.9  # of the hidden ones: below the first the mask token, below the second a random one, above it unchanged
# Words of the generator's key that keep these draws apart from those of windows, and training from validation.
_TRAINING, _VALIDATION = 1, 2


def hide(ids: Ids, labels: Ids, *, seed: int, first: int, mask_token: int, vocab: int, validation: bool = False) -> tuple[Ids, Ids]:
    """Samples [first, first + B) as ids (B, T) and the labels (B, T) of a causal model -> ids with some tokens hidden, and labels that hold what
    those were, -100 elsewhere.

    Random tokens come from [0, vocab). Places that are padding, which the causal labels mark by -100, are left alone. The same share of
    every sample is hidden, so the loss of a step is a mean over all its hidden tokens however it is cut into micro-batches.
    """
    hidden, wanted = ids.copy(), np.full_like(ids, IGNORED)
    for row in range(len(ids)):
        key = [seed, _VALIDATION if validation else _TRAINING]
        generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, first + row]))
        present = np.flatnonzero(labels[row] != IGNORED)
        places = generator.permutation(present)[: max(1, round(SHARE * len(present)))]
        kind, others = generator.random(len(places)), generator.integers(0, vocab, len(places))
        wanted[row, places] = ids[row, places]
        hidden[row, places] = np.where(kind < _MASKED, mask_token, np.where(kind < _CHANGED, others, ids[row, places]))
    return hidden, wanted
