"""Checkpoints of several ranks: any of them killed at any point of a save, states handed on between all stages and numbers of ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from packhorse.checkpoint import read_checkpoint
from packhorse.checkpoint.hugging_face import export_run
from packhorse.checkpoint.reshard import reshard
from shared import once

pytestmark = pytest.mark.cpu
JOBS = Path(__file__).with_name("several_ranks.py")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Folder of all jobs, and name of a set of jobs -> the exit codes of their ranks."""

    def make():
        root = tmp_path_factory.mktemp("ranks")
        ran = subprocess.run([sys.executable, JOBS, root], capture_output=True, text=True, timeout=500)
        assert ran.returncode == 0, ran.stderr
        return [str(root), json.loads(ran.stdout)]

    return once(tmp_path_factory, "checkpoints of ranks", make)


@pytest.fixture(scope="module")
def root(jobs):
    return Path(jobs[0])


@pytest.fixture(scope="module")
def codes(jobs):
    return jobs[1]


def losses(root, name):
    """Step at which each process started, and (step, loss) of every step that any took."""
    words = [line.split() for line in (root / f"{name}.losses").read_text().splitlines()]
    return [int(b) for a, b in words if a == "start"], [(int(a), float.fromhex(b)) for a, b in words if a != "start"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# where the second process starts: the checkpoint of step 3 is there, or is not, when the rank dies
@pytest.mark.parametrize(
    ("point", "victim", "start"),
    [(point, victim, 2) for point in ("staging", "syncing") for victim in (0, 1)]
    + [("manifest", 0, 2), ("manifest", 1, 3), ("rename", 0, 2), ("rename", 1, 3), ("pruning", 0, 3), ("pruning", 1, 3)],
)
def test_killed_there_the_same_command_goes_on_as_if_nothing_had_happened(codes, root, point, victim, start):
    name = f"{point}-{victim}"
    broken, again = codes["kills"][name]
    assert broken[victim] == -9 and broken[1 - victim] == 2, "the other rank ends by itself, with an error in words"
    assert again == codes["kills"]["whole"] == [0, 0]
    unbroken = dict(losses(root, "whole")[1])
    starts, seen = losses(root, name)
    assert sorted(unbroken) == [1, 2, 3, 4] and starts == [0, start]
    assert [step for step, _ in seen] == [1, 2, 3, *range(start + 1, 5)]
    assert all(loss == unbroken[step] for step, loss in seen)
    assert names(root / name) == names(root / "whole") == ["step-3", "step-4"]


def test_four_then_two_then_one_then_three_ranks_see_every_sample_in_order(codes, root):
    assert codes["ranks_in_turn"] == {"turns": [[0] * 4, [0] * 2, [0], [0] * 3], "alone": [0]}
    starts, seen = losses(root, "turns")
    _, alone = losses(root, "alone")
    assert starts == [0, 2, 4, 6] and [step for step, _ in seen] == [step for step, _ in alone] == list(range(1, 9))
    assert all(abs(one - other) <= 1e-12 for (_, one), (_, other) in zip(seen, alone))


def test_a_state_comes_through_all_stages_and_numbers_of_ranks_bit_for_bit(codes, root):
    assert codes["handed_on"] == [[0] * ranks for ranks in (1, 3, 2, 4, 2, 1)]
    first, meta = read_checkpoint(root / "handed-0")
    assert torch.equal(first["state/step.f32.g0"], torch.full((5,), 2.0)), "embed, two blocks, the convolution and the scale have taken two steps"
    for place, ranks in enumerate((1, 3, 2, 4, 2, 1)):
        state, other = read_checkpoint(root / f"handed-{place}")
        assert {name for name in state if name not in first} == {f"random.{rank}/cpu" for rank in range(1, ranks)}
        for name, tensor in first.items():
            assert torch.equal(state[name], tensor) and state[name].dtype == tensor.dtype, (place, name)
        assert other["step"] == meta["step"] and other["step"]["num_steps"] == 2 and other["extra"] == {"place": place}
        streams = [state[name] for name in state if name.startswith("random")]
        assert len({stream.numpy().tobytes() for stream in streams}) == ranks, "no two ranks draw the same"


def test_the_next_step_is_that_of_a_job_that_was_never_broken(codes, root):
    loss = [(root / f"handed-{place}.loss").read_text() for place in range(6)]
    assert loss[5] == loss[0], "one rank went on by itself, and came back from four others"
    assert loss[4] == loss[2], "two ranks at stage 0 and at stage 1"
    assert len(set(loss)) > 1 and all(abs(float.fromhex(other) - float.fromhex(loss[0])) < 0.1 for other in loss)


def test_a_state_comes_through_all_meshes_bit_for_bit(codes, root, tmp_path):
    """tp 2 x dp 2 at stage 3, tp 4, one rank, dp 2, tp 2. Padded rows of the vocabulary and second copies of heads are not saved."""
    assert codes["over_tp"] == [[0] * ranks for ranks in (4, 4, 1, 2, 2)]
    states = [read_checkpoint(root / "llama" / "checkpoints" / f"step-{place}")[0] for place in range(1, 6)]
    first = {name: tensor for name, tensor in states[0].items() if not name.startswith("random")}
    assert first["param/model.embed_tokens.weight"].shape == (301, 32) and first["param/model.layers.0.self_attn.k_proj.weight"].shape == (16, 32)
    for state in states[1:]:
        assert all(torch.equal(state[name], tensor) for name, tensor in first.items())
        assert {name for name in state if not name.startswith("random")} == first.keys()
    loss = [[float.fromhex(path.read_text()) for path in sorted((root / "llama").glob(f"{place}-*.loss"))] for place in range(5)]
    assert all(abs(one - loss[2][0]) < 1e-5 for ranks in loss for one in ranks), loss


def test_what_tp_ranks_saved_comes_out_for_from_pretrained(codes, root, tmp_path):
    transformers = pytest.importorskip("transformers")
    state = read_checkpoint(root / "llama" / "checkpoints" / "step-1")[0]
    export_run(root / "llama", tmp_path / "out", checkpoint=root / "llama" / "checkpoints" / "step-1", say=lambda text: None)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(parameter, state[f"param/{name}"]) for name, parameter in loaded.named_parameters())


def test_every_element_is_saved_once_and_every_rank_saves_its_share(codes, root):
    whole = sum(tensor.numel() * tensor.element_size() for name, tensor in read_checkpoint(root / "handed-0")[0].items() if "random" not in name)
    for place, ranks in ((1, 3), (3, 4), (4, 2)):
        sizes = [path.stat().st_size for path in sorted((root / f"handed-{place}").glob("rank-*"))]
        assert len(sizes) == ranks
        headers = [int.from_bytes(path.read_bytes()[:8], "little") + 8 for path in sorted((root / f"handed-{place}").glob("rank-*"))]
        assert sum(sizes) - sum(headers) == whole + 5056 * ranks  # a generator's state on the host has 5056 bytes


def test_a_full_disk_of_one_rank_is_told_to_all_and_nothing_is_lost(codes, root):
    assert codes["full_disk"] == [0, 0]
    (full, bad), left = json.loads((root / "full.told-0").read_text())
    assert full.startswith("rank 1: cannot save the checkpoint") and "No space left on device" in full
    assert bad.startswith("rank 0: cannot save the extra values")
    assert json.loads((root / "full.told-1").read_text())[0] == [full, bad] and left == ["step-1"]
    assert names(root / "full") == ["step-1", "step-2"]


def test_resharded_ones_are_the_same(codes, root, tmp_path):
    state, meta = read_checkpoint(root / "handed-3")
    for count in (1, 3):
        reshard(root / "handed-3", tmp_path / str(count), count)
        found, other = read_checkpoint(tmp_path / str(count))
        assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state) and other == meta
