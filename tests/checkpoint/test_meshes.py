"""A state goes from any mesh (dp, tp) and stage of ZeRO to any other, through checkpoints, and comes out as it was."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from fake_mesh import Rank, on_mesh
from packhorse.checkpoint import load, read_checkpoint, rows, save, stream
from packhorse.checkpoint.reshard import reshard
from packhorse.mesh import Mesh
from packhorse.parallel.split import Split

pytestmark = pytest.mark.cpu
MESHES = [(1, 2), (2, 1), (2, 2), (1, 4), (3, 1), (3, 2)]
DEGREE = 4  # splits are such that they hold for tp 1, 2 and 4


@st.composite
def models(draw):
    """values, splits, states: parameters in any order of memory; of some, one dim is cut: in blocks, or padded."""
    torch.manual_seed(draw(st.integers(0, 1000)))
    values, splits = {}, {}
    for number in range(draw(st.integers(1, 4))):
        name, shape = f"p{number}", draw(st.lists(st.integers(1, 5), min_size=0, max_size=3))
        if shape and draw(st.booleans()):
            dim = draw(st.integers(0, len(shape) - 1))
            blocks = tuple(DEGREE * n for n in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
            padding = draw(st.integers(0, min(blocks[-1], sum(blocks) - 1)))
            shape[dim] = sum(blocks) - padding
            splits[name] = Split(dim, blocks, padding)
        order = draw(st.permutations(range(len(shape))))
        values[name] = torch.randn([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])
    states = {name: (torch.randn(v.shape), torch.rand(v.shape), number + 2) for number, (name, v) in enumerate(values.items())}
    return values, splits, states


@st.composite
def places(draw):
    return draw(st.sampled_from(MESHES)), draw(st.integers(0, 3))


def expected(values, states):
    """Name in a checkpoint -> tensor, from the model alone. Every second parameter is of the second group."""
    names, found = list(values), {"buffer/seen": torch.arange(3.0)}
    for number, name in enumerate(names):
        group = number % 2
        found |= {
            f"param/{name}": values[name],
            f"state/exp_avg.f32.g{group}/{name}": states[name][0],
            f"state/exp_avg_sq.f32.g{group}/{name}": states[name][1],
        }
    for group in (0, 1):
        if names[group::2]:
            found[f"state/step.f32.g{group}"] = torch.tensor([float(states[name][2]) for name in names[group::2]])
    return found


def same(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.fixture(autouse=True, scope="module")
def a_few_elements_at_a_time():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_CHUNK_ELEMENTS", 7)
        patch.setattr(stream, "_CHUNK_BYTES", 44)
        yield


@settings(max_examples=10)
@given(models(), places(), places(), st.sampled_from([None, torch.bfloat16]), st.integers(1, 5))
def test_from_any_mesh_to_any_other(tmp_path_factory, model, there, here, precision, files):
    values, splits, states = model
    root, wanted = tmp_path_factory.mktemp("meshes"), expected(values, states)
    (mesh, stage), (other_mesh, other_stage) = there, here
    nothing = {name: torch.zeros_like(tensor) for name, tensor in values.items()}

    def begin(ranks):
        # only rank 0 has the values: the others get them
        rank = Rank(ranks, stage, nothing if ranks.rank else values, splits, states, precision)
        save(root / "first", rank)
        return rank.whole(), rank.padding()

    def go_on(ranks, source, stage):
        rank = Rank(ranks, stage, nothing, splits, {}, precision)
        load(root / source, rank)
        save(root / "second", rank)
        return rank.whole(), rank.padding()

    for whole, padding in on_mesh(Mesh(*mesh), begin) + on_mesh(Mesh(*other_mesh), lambda ranks: go_on(ranks, "first", other_stage)):
        assert same(whole, values) and not padding.any()
    reshard(root / "second", root / "third", files)
    for name in ("first", "second", "third"):
        assert same(read_checkpoint(root / name)[0], wanted), name
    for whole, _ in on_mesh(Mesh(*mesh), lambda ranks: go_on(ranks, "third", stage)):
        assert same(whole, values)
    for name in ("first", "second"):
        saved = sum(tensor.numel() for path in (root / name).glob("*.safetensors") for tensor in load_file(path).values())
        assert saved == sum(tensor.numel() for tensor in wanted.values()), "every element is saved once"


HANDS = [((1, 2), 0), ((1, 4), 3), ((2, 2), 3), ((1, 4), 0), ((3, 1), 2), ((3, 2), 1), ((1, 2), 2), ((2, 1), 0), ((2, 4), 3)]


def test_handed_on_over_many_meshes(tmp_path):
    """A fused projection, one that is cut along its columns, a vocabulary that no degree divides, in both orders of memory, and what is whole."""
    torch.manual_seed(0)
    values = {
        "vocabulary": torch.randn(13, 3),
        "fused": torch.randn(24, 5),
        "columns": torch.randn(5, 8),
        "scale": torch.randn(()),
        "bias": torch.randn(24),
        "transposed": torch.randn(3, 13).t(),
        "whole": torch.randn(7, 2),
    }
    fused, padded = Split(0, (12, 4, 8)), Split(0, (16,), 3)
    splits = {"vocabulary": padded, "fused": fused, "columns": Split(1, (8,)), "bias": fused, "transposed": padded}
    states = {name: (torch.randn(v.shape), torch.rand(v.shape), number) for number, (name, v) in enumerate(values.items())}
    nothing = {name: torch.zeros_like(tensor) for name, tensor in values.items()}

    def hand_on(ranks, place, stage):
        rank = Rank(ranks, stage, nothing if place or ranks.rank else values, splits, {} if place else states)
        if place:
            load(tmp_path / str(place - 1), rank)
        save(tmp_path / str(place), rank)
        return rank.whole(), rank.padding()

    for place, (mesh, stage) in enumerate(HANDS):
        for whole, padding in on_mesh(Mesh(*mesh), lambda ranks, place=place, stage=stage: hand_on(ranks, place, stage)):
            assert same(whole, values) and not padding.any(), place
        assert same(read_checkpoint(tmp_path / str(place))[0], expected(values, states)), place


def test_one_file_of_a_split_tensor_has_its_shape(tmp_path):
    weight = torch.arange(24.0).view(4, 6)
    states = {"w": (torch.zeros(4, 6), torch.zeros(4, 6), 0)}
    on_mesh(Mesh(1, 2), lambda ranks: save(tmp_path / "two", Rank(ranks, 0, {"w": weight}, {"w": Split(1, (2, 4))}, states)))
    first = load_file(tmp_path / "two" / "rank-0000.safetensors")["param/w"]
    assert first.tolist() == [row * 6 + column for row in range(4) for column in (0, 2, 3)], "its half of both blocks, row by row"
    reshard(tmp_path / "two", tmp_path / "one", 1)
    assert torch.equal(load_file(tmp_path / "one" / "tensors.safetensors")["param/w"], weight)
    version = [json.loads((tmp_path / name / "manifest.json").read_bytes())["body"]["version"] for name in ("two", "one")]
    assert version == [3, 2], "what has no parts is read by the version before"
