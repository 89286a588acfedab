import io
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for fake_engine


@pytest.fixture
def texts(tmp_path):
    """A folder with two files of text; the last twentieth of each is for validation."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(2):
        (folder / f"{i}.txt").write_text("".join(f"{i} line {j}: to be or not to be, that is it.\n" for j in range(100)))
    return folder


@pytest.fixture
def out():
    return io.StringIO()
