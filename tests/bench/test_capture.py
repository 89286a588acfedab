import json

import pytest

from packhorse.bench.capture import run
from packhorse.errors import UserError

pytestmark = pytest.mark.cpu


def test_the_smallest_gpt2_on_a_short_text(capsys):
    """12 blocks of 12 D^2 weights and 13 D biases and scales, two embeddings and the last norm (Radford et al. 2019)."""
    assert run(["--seq-len", "8", "--size", "gpt2", "--blocks", "2", "--steps", "0"], as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    width = 768
    assert found["parameters"] == 12 * (12 * width**2 + 13 * width) + (50257 + 1024) * width + 2 * width
    # parameters, gradients and two moments in fp32, and more
    assert found["peak_bytes"] > 16 * found["parameters"]
    (deep,) = found["deep"]
    # a block is 2 norms, 4 matrix products and their gradients, at the least
    assert deep["step"] == "GPT of 2 blocks" and deep["nodes"] > 2 * 3 * 6 and deep["cpu_s"] > 0 < deep["whole_cpu_s"]


def test_bad_words_are_said():
    with pytest.raises(UserError, match="--seq-len 0"):
        run(["--seq-len", "0"], as_json=False)
    with pytest.raises(UserError, match="--steps -1"):
        run(["--steps", "-1"], as_json=False)
    with pytest.raises(UserError, match="gpt2-xl"):
        run(["--size", "gpt2-x"], as_json=False)
