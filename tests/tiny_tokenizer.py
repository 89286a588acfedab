"""A tiny tokenizer made on the spot."""

import json
from pathlib import Path

import pytest

END = "<|endoftext|>"


def save_tokenizer(folder: Path) -> Path:
    """Makes `folder` with a tokenizer.json: byte-level BPE of about 290 tokens, learnt from a few lines; token 0 ends a text."""
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(["the horse carries what the rider packs\n", "what is packed is carried\n"] * 5, trainer)
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return folder
