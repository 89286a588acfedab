"""A tiny tokenizer, and somebody to report to."""

from contextlib import contextmanager

import pytest

from tiny_tokenizer import save_tokenizer


@pytest.fixture
def tokenizer_folder(tmp_path):
    return save_tokenizer(tmp_path / "tokenizer")


class Listener:
    """Keeps what is said, and how far each bar went of its total."""

    def __init__(self):
        self.said, self.bars = [], {}

    def say(self, text):
        self.said.append(text)

    @contextmanager
    def progress(self, title, total):
        self.bars[title] = [0, total]

        def advance(num_bytes):
            self.bars[title][0] += num_bytes

        yield advance


@pytest.fixture
def listener():
    return Listener()
