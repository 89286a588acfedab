"""A cover of the zoo (every family; `packhorse bench zoo` runs all): bit-equal and exact, or refused with line and reason."""

import re
import statistics
from functools import cache

import pytest
import torch

from packhorse.bench.architectures import architectures
from packhorse.bench.zoo import Outcome, attempt, render, run
from packhorse.errors import UserError

pytestmark = pytest.mark.cpu
transformers = pytest.importorskip("transformers")

# What forbids a capture: the line of code, and the reason.
REFUSED = {
    "ReformerModelWithLMHead": (r"modeling_reformer.py:\d+", "seeds torch's default generator"),  # a reversible backward pass of its own
    "Wav2Vec2ForCTC": (r"loss_ctc.py:\d+", "masked_select"),
    "SwitchTransformersForConditionalGeneration": (r"modeling_switch_transformers.py:\d+", "nonzero"),
}
ALL = {a.name: a for a in architectures()}
COVER = [name for number, (name, a) in enumerate(ALL.items()) if number % 3 == 0 or a.family in ("plain", "recurrent") or name in REFUSED]


@cache
def outcome(name: str) -> Outcome:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    return attempt(ALL[name])


def test_the_cover_is_wide_enough():
    assert len(COVER) >= 36 and {ALL[name].family for name in COVER} == {a.family for a in ALL.values()}
    assert len(ALL) == len(architectures())  # names are different


@pytest.mark.parametrize("name", COVER)
def test_bit_equal_or_refused_with_the_line(name):
    found = outcome(name)
    if name in REFUSED:
        line, reason = REFUSED[name]
        assert found.status == "refused" and reason in found.reason
        assert re.search(line, found.reason)
        return
    assert found.status == "bit-equal", found.reason
    assert found.exact
    assert found.arena_ratio is not None and found.arena_ratio <= 1.0


def test_nine_of_ten_and_the_median_of_the_arena():
    outcomes = [outcome(name) for name in COVER]
    equal = [o for o in outcomes if o.status == "bit-equal"]
    assert len(equal) >= 0.9 * len(outcomes)
    assert statistics.median(o.arena_ratio for o in equal) <= 0.85
    assert f"{len(equal)} of {len(outcomes)} architectures" in render(outcomes)


def test_an_outcome_of_each_kind_shows_its_reason():
    rows = [Outcome("a", "f", "differs", "losses 1 | 2"), Outcome("b", "f", "fails in PyTorch", "no"), Outcome("c", "f", "refused", "line 3")]
    text = render(rows)
    assert "differs: losses 1 \\| 2" in text and "fails in PyTorch: no" in text and "0 of 3" in text


def test_an_unknown_name_is_said():
    with pytest.raises(UserError, match=r"^bench zoo: no architecture is called nonsense; without a name") as caught:
        run(["nonsense"], as_json=False)
    assert "nearest" not in str(caught.value)
    with pytest.raises(UserError, match=r"no architecture is called lamma; the nearest are .*Llama"):
        run(["GPT2", "lamma"], as_json=False)
