"""Plans of several ranks, made by one process."""

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import packhorse.cli.planned as planned
from packhorse.cli.main import app
from packhorse.cli.planned import config_of, largest_peak, plan_of
from packhorse.errors import ConfigError, UserError
from packhorse.mesh import Mesh

pytestmark = pytest.mark.cpu


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(
        "[model]\nlayers = 2\nwidth = 16\nheads = 2\n[data]\nseq_len = 8\nmicro_batch_size = 2\nglobal_batch_size = 8\n[mesh]\nzero_stage = 3\n"
    )
    return file


def test_gpus_are_ranks_of_the_mesh(path, monkeypatch):
    monkeypatch.setenv("RANK", "1")  # nothing here listens to a launcher
    one, four = plan_of(path, []), plan_of(path, [], 4)
    assert one.comm_bytes == 0 and four.options.mesh.dp == 4 and four.options.rank == 0 and four.options.num_micro_batches == 1
    held = [plan.persistent.bytes_by_kind()["optimizer states"] for plan in (one, four)]
    assert held[1] == pytest.approx(held[0] / 4, rel=0.03)  # padding of a small model


def test_what_is_printed(path):
    shown = CliRunner().invoke(app, ["plan", str(path), "--gpus", "2"], catch_exceptions=False).stdout
    assert "2 micro-batches of 2 samples of 8 tokens on each of 2 ranks, ZeRO stage 3" in shown
    assert "this is rank 0; of all 2 ranks" in shown and "all 2 ranks fit" in shown
    assert "rank" not in CliRunner().invoke(app, ["plan", str(path)], catch_exceptions=False).stdout.splitlines()[0]


def test_gpus_are_shared_out_among_dp_and_tp(path):
    assert config_of(path, ["mesh.tp=2"], 4).ranks == Mesh(dp=2, tp=2)
    assert config_of(path, ["mesh.tp=4", "mesh.dp=7"], 4).ranks == Mesh(
        dp=1, tp=4
    )  # the file's dp is of no matter, nor that 8 samples are no sevenths
    with pytest.raises(ConfigError, match=r"--gpus is 3, and mesh.tp = 2 of them share a model; give a multiple of 2"):
        config_of(path, ["mesh.tp=2"], 3)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["mesh.tp=2"], "1 micro-batch of 2 samples of 8 tokens in each of 4 groups of 2 ranks that share matrices (dp 4, tp 2), ZeRO stage 3"),
        (
            ["mesh.tp=8", "mesh.sequence_parallel=true"],
            "4 micro-batches of 2 samples of 8 tokens in each of 1 group of 8 ranks that share matrices and the sequence (dp 1, tp 8), ZeRO stage 3",
        ),
    ],
)
def test_the_mesh_is_printed(path, monkeypatch, overrides, words):
    seen = []

    def plan(config, rank):
        seen.append(rank)
        return SimpleNamespace(peak_bytes=10 + (rank == 5))

    monkeypatch.setattr(planned, "_planned", plan)
    asked = [part for override in overrides for part in ("--set", override)]
    shown = CliRunner().invoke(app, ["plan", str(path), "--gpus", "8", *asked], catch_exceptions=False).stdout
    assert words in shown and "this is rank 0; of all 8 ranks rank 5 needs the most: 11 B" in shown and "8 ranks fit" in shown
    assert seen == [0, *range(8)]


@pytest.mark.parametrize(
    ("peaks", "wanted"),
    [
        ([7, 7], (0, 7, 2)),
        ([7, 9, 9], (1, 9, 3)),
        ([1] * 8 + [3], (8, 3, 8)),
        (list(range(1000)), (999, 999, 8)),
    ],
)
def test_the_rank_that_needs_the_most(path, monkeypatch, peaks, wanted):
    monkeypatch.setattr(planned, "_planned", lambda config, rank: SimpleNamespace(peak_bytes=peaks[rank]))
    assert largest_peak(config_of(path, ["data.micro_batch_size=1", f"data.global_batch_size={len(peaks)}"], len(peaks))) == wanted


def test_no_ranks_are_refused(path):
    with pytest.raises(UserError, match="--gpus is 0, expected 1 or more"):
        plan_of(path, [], 0)
