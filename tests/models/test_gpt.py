import math

import pytest
import torch

from packhorse.models.gpt import GPT

pytestmark = pytest.mark.cpu


def small(**changes):
    torch.manual_seed(0)
    return GPT(**({"vocab": 256, "layers": 3, "width": 32, "heads": 4, "seq_len": 16} | changes))


def test_number_of_parameters_in_closed_form():
    V, L, D, T = 256, 3, 32, 16
    # Embeddings, 12 D^2 + 13 D a block (weights; biases 3D + D + 4D + D and two norms of 2D), the last norm; the head is tied.
    assert sum(p.numel() for p in small().parameters()) == V * D + T * D + L * (12 * D * D + 13 * D) + 2 * D


def test_an_untrained_model_knows_nothing():
    model = small(width=64)
    ids = torch.randint(256, (8, 16))
    assert model(ids, torch.randint(256, (8, 16))).item() == pytest.approx(math.log(256), abs=0.1)


def test_initial_scales():
    model = small(width=256, layers=8)
    assert model.tokens.weight is model.head.weight
    assert model.tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[3].feed_forward.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)  # sqrt(2 * 8) = 4
    assert model.blocks[3].attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_no_position_sees_the_future():
    model = small().eval()
    stream = {}
    model.norm.register_forward_hook(lambda module, args, out: stream.update(out=out))
    ids = torch.randint(256, (1, 16))
    model(ids, ids)
    before = stream["out"]
    changed = ids.clone()
    changed[0, 9] += 1
    model(changed % 256, ids)
    assert torch.equal(before[0, :9], stream["out"][0, :9])
    assert not torch.equal(before[0, 9:], stream["out"][0, 9:])


def test_attention_equals_the_formula():
    attention = small().blocks[0].attention.double()
    x = torch.randn(2, 16, 32, dtype=torch.float64)
    q, k, v = attention.qkv(x).split(32, dim=-1)
    heads = []
    for h in range(4):
        part = slice(8 * h, 8 * h + 8)
        scores = q[..., part] @ k[..., part].transpose(-1, -2) / math.sqrt(8)
        scores = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v[..., part])
    assert torch.allclose(attention(x), attention.out(torch.cat(heads, -1)), atol=1e-12)


def test_dropout_acts_in_training_only():
    model = small(dropout=0.5)
    ids = torch.randint(256, (2, 16))
    assert model(ids, ids) != model(ids, ids)
    model.eval()
    assert model(ids, ids) == model(ids, ids)
