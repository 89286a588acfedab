import math

import pytest
import torch
from torch.nn import functional as F

from against_plain import assert_steps_equal
from packhorse.models.bert import BERT

pytestmark = pytest.mark.cpu


def small(**changes):
    torch.manual_seed(0)
    return BERT(**({"vocab": 61, "layers": 2, "width": 32, "heads": 4, "seq_len": 16} | changes))


def batch(seed=0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(61, (3, 16), generator=g)
    return {"ids": ids, "labels": torch.where(torch.rand(3, 16, generator=g) < 0.3, ids, -100)}


@pytest.mark.parametrize("pre_norm", [False, True])
def test_three_steps_equal_plain_pytorch(pre_norm):
    assert_steps_equal(small(pre_norm=pre_norm).train(), batch())


def test_every_token_sees_every_other_and_its_segment():
    model = small(dropout=0.0).eval()
    given = batch()
    one = {"ids": given["ids"], "labels": torch.full((3, 16), -100)}
    one["labels"][:, 0] = 5
    before = model(**one)
    for place in (1, 15):
        changed = one | {"ids": one["ids"].clone()}
        changed["ids"][:, place] = (changed["ids"][:, place] + 1) % 61
        assert model(**changed) != before
    assert model(**one, segments=torch.zeros(3, 16, dtype=torch.int64)) == before
    assert model(**one, segments=torch.ones(3, 16, dtype=torch.int64)) != before


def test_only_hidden_tokens_count():
    model = small(dropout=0.0).eval()
    given = batch()
    logits = {}
    model.head.register_forward_hook(lambda module, args, out: logits.update(out=out))
    loss = model(**given)
    hidden = given["labels"] != -100
    picked = F.log_softmax(logits["out"].double(), -1)[hidden].gather(-1, given["labels"][hidden][:, None])
    assert loss.item() == pytest.approx(-picked.mean().item(), rel=1e-5)
    assert loss.item() == pytest.approx(math.log(61), abs=0.1)


def test_a_block_equals_the_formulas_of_both_arrangements():
    for pre_norm in (False, True):
        block = small(pre_norm=pre_norm, dropout=0.0).blocks[0].double().eval()
        x = torch.randn(2, 16, 32, dtype=torch.float64)
        heads = []
        inner = block.norm_attention(x) if pre_norm else x
        q, k, v = block.attention.qkv(inner).split(32, dim=-1)
        for h in range(4):
            part = slice(8 * h, 8 * h + 8)
            heads.append((q[..., part] @ k[..., part].transpose(-1, -2) / math.sqrt(8)).softmax(-1) @ v[..., part])
        attended = block.attention.out(torch.cat(heads, -1))
        first, _, second = block.feed_forward
        if pre_norm:
            y = x + attended
            expected = y + second(F.gelu(first(block.norm_feed_forward(y))))
        else:
            y = block.norm_attention(x + attended)
            expected = block.norm_feed_forward(y + second(F.gelu(first(y))))
        assert torch.allclose(block(x), expected, atol=1e-12)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_the_norm_stands_before_the_blocks_or_behind_them(pre_norm):
    model = small(pre_norm=pre_norm, dropout=0.0).double().eval()
    given = batch()
    x = model.tokens.weight[given["ids"]] + model.positions.weight + model.segments.weight[0]
    x = x if pre_norm else model.norm(x)
    for block in model.blocks:
        x = block(x)
    x = model.norm(x) if pre_norm else x
    first, _, norm = model.transform
    scores = norm(F.gelu(first(x))) @ model.tokens.weight.T + model.head.bias
    hidden = given["labels"] != -100
    expected = -scores.log_softmax(-1)[hidden].gather(-1, given["labels"][hidden][:, None]).mean()
    assert model(**given).item() == pytest.approx(expected.item(), rel=1e-12)
