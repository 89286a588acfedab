"""Published transformer sizes by name: those of GPT-2 and of the papers whose memory this project computes. No torch.

Names follow the sources: what a source calls "8.3B" is `megatron-8.3b`. The ZeRO sizes are named after 12 L D^2, the weights of the blocks
alone, not after exact counts.
"""

import difflib
from dataclasses import dataclass

from packhorse.errors import ConfigError

GPT2_VOCAB = 50257
PADDED_VOCAB = 51200  # GPT-2's, padded to a multiple of 128 * 8 (Shoeybi et al. 2019, appendix B.1)
BERT_VOCAB = 30522


@dataclass(frozen=True)
class Size:
    """`layers` blocks of `width` channels in `heads` heads, over `vocab` tokens and at most `seq_len` positions.

    pre_norm: layer norms stand before attention and feed-forward (all GPTs), not after the addition (BERT as it was published).
    """

    layers: int
    width: int
    heads: int
    vocab: int
    seq_len: int = 1024
    pre_norm: bool = True


def _zero(layers: int, width: int, heads: int) -> Size:
    return Size(layers, width, heads, PADDED_VOCAB)


GPT_SIZES = {
    # Radford et al. 2019, table 2; named as Hugging Face does. The paper's "1.5B" is gpt2-xl.
    "gpt2": Size(12, 768, 12, GPT2_VOCAB),
    "gpt2-medium": Size(24, 1024, 16, GPT2_VOCAB),
    "gpt2-large": Size(36, 1280, 20, GPT2_VOCAB),
    "gpt2-xl": Size(48, 1600, 25, GPT2_VOCAB),
    # Shoeybi et al. 2019, arXiv:1909.08053, table 1 (96 channels a head) and table 2 (355M)
    "megatron-355m": Size(24, 1024, 16, PADDED_VOCAB),
    "megatron-1.2b": Size(40, 1536, 16, PADDED_VOCAB),
    "megatron-2.5b": Size(54, 1920, 20, PADDED_VOCAB),
    "megatron-4.2b": Size(64, 2304, 24, PADDED_VOCAB),
    "megatron-8.3b": Size(72, 3072, 32, PADDED_VOCAB),
    # Rajbhandari et al. 2020, arXiv:1910.02054, the runs of figure 2. 20b and 40b as in the SC'20 version: the widths of the first one
    # do not give the sizes in its labels
    "zero-1.5b": _zero(48, 1600, 16),
    "zero-8b": _zero(72, 3072, 24),
    "zero-20b": _zero(98, 4096, 32),
    "zero-40b": _zero(88, 6144, 32),
    "zero-60b": _zero(132, 6144, 32),
    "zero-80b": _zero(100, 8192, 64),
    "zero-100b": _zero(125, 8192, 64),
    "zero-120b": _zero(150, 8192, 64),
    "zero-140b": _zero(175, 8192, 64),
    "zero-170b": _zero(212, 8192, 64),
    # The same, figure 4: data parallelism alone
    "zero-dp-1.16b": _zero(24, 1920, 16),
    "zero-dp-1.5b": _zero(34, 1920, 16),
    "zero-dp-2.5b": _zero(54, 1920, 16),
    "zero-dp-4b": _zero(64, 2304, 24),
    "zero-dp-6b": _zero(52, 3072, 24),
    "zero-dp-8b": _zero(72, 3072, 24),
    "zero-dp-10b": _zero(50, 4096, 32),
    "zero-dp-11b": _zero(54, 4096, 32),
    "zero-dp-12b": _zero(58, 4096, 32),
    "zero-dp-13b": _zero(62, 4096, 32),
    # Turing-NLG, trained with ZeRO; from its announcement, 2020
    "turing-17b": _zero(78, 4256, 28),
    # ZeRO speaks of a trillion parameters without a configuration; this one is of Narayanan et al. 2021, arXiv:2104.04473, table 1
    "megatron-1t": Size(128, 25600, 160, PADDED_VOCAB, seq_len=2048),
}

BERT_SIZES = {
    # Devlin et al. 2019, arXiv:1810.04805, section 3
    "bert-base": Size(12, 768, 12, BERT_VOCAB, 512, pre_norm=False),
    "bert-large": Size(24, 1024, 16, BERT_VOCAB, 512, pre_norm=False),
    # Shoeybi et al. 2019, table 4; with the norms moved as in figure 7 (b), without which the larger ones do not train
    "megatron-bert-336m": Size(24, 1024, 16, BERT_VOCAB, 512),
    "megatron-bert-1.3b": Size(24, 2048, 32, BERT_VOCAB, 512),
    "megatron-bert-3.9b": Size(48, 2560, 40, BERT_VOCAB, 512),
}

SIZES = {"gpt": GPT_SIZES, "bert": BERT_SIZES}


def find_size(kind: str, name: str) -> Size:
    """The size called `name` of model.kind `kind`. Raises ConfigError with the nearest known name, of whatever kind, or if the
    kind has no named sizes."""
    if kind not in SIZES:
        raise ConfigError(
            f"model.size = {name!r} names a published size, and model.kind = {kind!r} has none; "
            f"expected model.kind {' or '.join(SIZES)}, or set layers and width instead"
        )
    if name not in SIZES[kind]:
        homes = {size: home for home, sizes in SIZES.items() for size in sizes}
        close = difflib.get_close_matches(name.lower(), homes, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        if close and homes[close[0]] != kind:
            hint = f"{close[0]} is a size of model.kind = {homes[close[0]]!r}; set that. "
        raise ConfigError(f"model.size = {name!r} is no known size of kind {kind!r}; {hint}Known: {', '.join(SIZES[kind])}")
    return SIZES[kind][name]
