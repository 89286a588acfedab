"""Bytes of what tensor parallel ranks hold, counted by hand."""

import pytest
import torch

from fake_mesh import Rank, on_mesh
from packhorse.mesh import Mesh
from packhorse.parallel.split import Split

pytestmark = pytest.mark.cpu
SHAPES = {"vocabulary": (13, 8), "weight": (64, 8), "bias": (8,)}
SPLITS = {"vocabulary": Split(0, (16,), 3), "weight": Split(0, (32, 32))}


def held(mesh, stage, precision=None):
    values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    return on_mesh(Mesh(*mesh), lambda ranks: Rank(ranks, stage, values, SPLITS, {}, precision))


@pytest.mark.parametrize("tp", [2, 4])
def test_split_parameters_take_their_share_and_the_stated_padding(tp):
    for rank, one in enumerate(held((1, tp), 0)):
        kinds = one.persistent.bytes_by_kind()
        rows = min(max(13 - 16 // tp * rank, 0), 16 // tp)  # of the vocabulary, and no padding
        num = rows * 8 + 64 * 8 // tp + 8
        assert (kinds["parameters"], kinds["gradients"], kinds["optimizer states"]) == (4 * num, 4 * num, 8 * num + 4 * 3)
        assert kinds.get("stated padding", 0) == 16 * (16 // tp - rows) * 8, "in the parameter, its gradient and both states"
        assert sum(kinds.values()) == one.persistent.num_bytes
        words = {run.name: run.is_split for run in one.persistent.runs if run.kind == "parameters"}
        assert words == {"param.f32.g0.split.unit.0": True, "param.f32.g1.split.unit.0": True, "param.f32.g0.whole.unit.1": False}


def test_a_rank_of_both_axes_holds_a_shard_of_its_part():
    kinds = [one.persistent.bytes_by_kind() for one in held((2, 2), 3, torch.bfloat16)]
    # 16-bit parameters and gradients, and wide master weights and states: 16 bytes a parameter, and whole numbers of steps
    assert sum(sum(k.get(kind, 0) for kind in ("parameters", "gradients", "master weights")) for k in kinds) == 8 * (13 * 8 + 64 * 8 + 2 * 8)
    assert sum(k["optimizer states"] for k in kinds) == 8 * (13 * 8 + 64 * 8 + 2 * 8) + 4 * 4 * 3
    assert sum(k.get("stated padding", 0) for k in kinds) == 16 * 3 * 8


def test_without_a_sharding_names_and_bytes_are_as_ever():
    (one,) = held((1, 1), 0)
    assert [run.name for run in one.persistent.runs if run.kind == "parameters"] == [
        "param.f32.g0.unit.0",
        "param.f32.g1.unit.0",
        "param.f32.g0.unit.1",
    ]
    assert "stated padding" not in one.persistent.bytes_by_kind()
