import pytest

from packhorse.report.again import made_again

pytestmark = pytest.mark.pure


def test_rows_by_module_and_operator(by_hand):
    plan = by_hand()
    product, gelu = sorted(made_again(plan.programs["first"].graph, plan.device), key=lambda row: -row.flops)
    assert (product.module, product.op, product.source) == ("blocks.*.up", "aten.mm.default", "model.py:3")
    assert (product.values, product.nodes, product.freed, product.seconds) == (1, 1, 32768, 1.0)
    assert product.flops == 2 * 64 * 64 * 128  # (64, 64) @ (64, 128)
    assert (gelu.op, gelu.values, gelu.nodes, gelu.freed, gelu.flops) == ("aten.gelu.default", 1, 1, 32768, 0)


def test_what_no_backward_node_reads_frees_nothing_and_blocks_that_are_alike_are_one_row(by_hand):
    text = """graph first
input %x: f32[64, 128] = batch "x"
input %w1: f32[64, 128] = param "w1"
input %w2: f32[128, 32] = param "w2"
%a: f32[64, 128] = aten.gelu.default(%x)  # forward | blocks.0.act | m.py:1
%b: f32[64, 128] = aten.gelu.default(%a)  # forward | blocks.1.act | m.py:1
%c: f32[64, 128] = aten.gelu.default(%b)  # forward | last | m.py:2
%.mirror1.a: f32[64, 128] = aten.gelu.default(%x)  # recompute | blocks.0.act | m.py:1
%.mirror1.b: f32[64, 128] = aten.gelu.default(%.mirror1.a)  # recompute | blocks.1.act | m.py:1
%d: f32[64, 128] = aten.mul.Tensor(%c, %.mirror1.b)  # backward | last | m.py:2
%.mirror2.a: f32[64, 128] = aten.gelu.default(%x)  # recompute | blocks.0.act | m.py:1
%.mirror2.b: f32[64, 128] = aten.gelu.default(%.mirror2.a)  # recompute | blocks.1.act | m.py:1
%f: f32[64, 128] = aten.mul.Tensor(%d, %.mirror2.b)  # backward | last | m.py:2
output %f = grad "w1"
"""
    plan = by_hand(text=text)
    (row,) = made_again(plan.programs["first"].graph, plan.device)
    assert (row.module, row.values, row.nodes, row.freed) == ("blocks.*.act", 2, 4, 32768)


def test_nothing_is_made_again_where_everything_is_kept(by_hand):
    kept = """graph first
input %x: f32[64, 128] = batch "x"
input %w1: f32[64, 128] = param "w1"
input %w2: f32[128, 32] = param "w2"
%a: f32[64, 128] = aten.gelu.default(%x)  # forward | a | m.py:1
"""
    plan = by_hand(text=kept)
    assert made_again(plan.programs["first"].graph, plan.device) == []


def test_a_value_that_is_kept_as_well_frees_nothing(by_hand):
    text = """graph first
input %x: f32[64, 128] = batch "x"
input %w1: f32[64, 128] = param "w1"
input %w2: f32[128, 32] = param "w2"
%a: f32[64, 128] = aten.gelu.default(%x)  # forward | a | m.py:1
%.mirror1.a: f32[64, 128] = aten.gelu.default(%x)  # recompute | a | m.py:1
%d: f32[64, 128] = aten.mul.Tensor(%a, %.mirror1.a)  # backward | a | m.py:1
output %d = grad "w1"
"""
    plan = by_hand(text=text)
    (row,) = made_again(plan.programs["first"].graph, plan.device)
    assert (row.values, row.freed) == (1, 0)
