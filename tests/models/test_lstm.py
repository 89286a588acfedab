import pytest
import torch

from against_plain import assert_steps_equal
from packhorse.models.lstm import LSTM, Unrolled

pytestmark = pytest.mark.cpu


def small(**changes):
    torch.manual_seed(0)
    return LSTM(**({"vocab": 31, "layers": 2, "width": 8, "dropout": 0.2} | changes))


def batch():
    g = torch.Generator().manual_seed(0)
    return {"ids": torch.randint(31, (3, 4), generator=g), "labels": torch.randint(31, (3, 4), generator=g)}


@pytest.mark.parametrize("cell,gates", [("lstm", 4), ("gru", 3)])
@pytest.mark.parametrize("unrolled", [True, False])
def test_number_of_parameters_in_closed_form(cell, gates, unrolled):
    V, L, D = 31, 2, 8
    # two embeddings and a bias; two matrices and two biases a gate and layer
    assert sum(p.numel() for p in small(cell=cell, unrolled=unrolled).parameters()) == 2 * V * D + V + L * gates * (2 * D * D + 2 * D)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_unrolled_cells_take_the_steps_of_plain_pytorch(cell):
    assert_steps_equal(small(cell=cell).train(), batch())


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_fused_layer_equals_the_operators_it_is_made_of_and_its_kernel_nearly(cell):
    model = small(cell=cell, unrolled=False, dropout=0.0).train()
    kernel = model(**batch()).item()  # as eager runs it: on the CPU through oneDNN
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        decomposed = model(**batch()).item()
        assert_steps_equal(model, batch())
    finally:
        torch._C._set_mkldnn_enabled(enabled)
    assert decomposed == pytest.approx(kernel, abs=1e-6)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_unrolled_equals_the_layer_with_the_same_weights(cell):
    fused, unrolled = small(cell=cell, unrolled=False).eval(), small(cell=cell).eval()
    for layer, one in enumerate(unrolled.body.cells):
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(one, name).data.copy_(getattr(fused.body.layers, f"{name}_l{layer}"))
    x = torch.randn(3, 4, 8)
    assert torch.allclose(unrolled.body(x), fused.body(x), atol=1e-6)


def test_dropout_lies_between_layers_only():
    torch.manual_seed(0)
    one = Unrolled(8, 1, 0.9, "lstm").train()
    x = torch.randn(3, 4, 8)
    assert torch.equal(one(x), one(x))
    two = Unrolled(8, 2, 0.9, "lstm").train()
    assert not torch.equal(two(x), two(x))
