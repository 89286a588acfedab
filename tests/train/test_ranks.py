"""`packhorse train` on two ranks: what a run is, seen from outside. One job makes all the runs (ranks_job.py)."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

import packhorse
from packhorse.checkpoint import read_checkpoint
from packhorse.train.config_file import load_config
from packhorse.train.console import Console
from packhorse.train.metrics import read_metrics
from packhorse.train.start import train
from packhorse.units import format_bytes
from shared import once

pytestmark = pytest.mark.cpu
HERE = Path(__file__).parent
CONFIG = """
[run]
steps = 6
log_every = 2
eval_every = 3
eval_batches = 3
save_every = 3
threads = 1

[model]
layers = 2
width = 16
heads = 2

[data]
corpus = "{texts}"
seq_len = 16
micro_batch_size = 2
global_batch_size = 8

[optimizer]
lr = 1e-2
clip_norm = 0.5

[mesh]
zero_stage = 3
"""


def environments(store, num_ranks):
    """What a launcher, which holds the store, sets for each rank."""
    shared = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    return [os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def start_ranks(commands):
    """One process a rank; their (exit code, stdout, stderr)."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pairs = zip(commands, environments(store, len(commands)), strict=True)
    processes = [subprocess.Popen(c, env=e, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c, e in pairs]
    try:
        said = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, said)]


def write_config(folder):
    texts = folder / "texts"
    texts.mkdir()
    for i in range(2):
        (texts / f"{i}.txt").write_text("".join(f"{i} line {j}: to be or not to be, that is it.\n" for j in range(100)))
    path = folder / "config.toml"
    path.write_text(CONFIG.format(texts=texts))
    return path


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Folder of the runs, and what each rank says of each run."""

    def make():
        folder = tmp_path_factory.mktemp("ranks")
        path = write_config(folder)
        outs = [folder / f"{rank}.json" for rank in range(2)]
        ended = start_ranks([[sys.executable, str(HERE / "ranks_job.py"), str(path), str(out)] for out in outs])
        assert [code for code, _, _ in ended] == [0, 0], ended
        return {"folder": str(folder), "ranks": [json.loads(out.read_text()) for out in outs]}

    made = once(tmp_path_factory, "runs of ranks", make)
    return Path(made["folder"]), made["ranks"]


@pytest.fixture(scope="module")
def alone(job):
    """The same run on one rank."""
    config = load_config(job[0] / "config.toml", [f"run.dir={job[0] / f'alone-{os.getpid()}'}"])
    assert train(config, engine=packhorse, console=Console(io.StringIO())) == 0
    return Path(config.run.dir)


def losses(folder, kind="step"):
    return [(record["step"], record["loss"]) for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == kind]


def test_two_ranks_take_the_steps_of_one(job, alone):
    """The same samples in every step, and the mean over the same validation batches, of which there are three for two ranks."""
    folder, ranks = job
    assert [rank["whole"]["code"] for rank in ranks] == [0, 0]
    for kind, count in (("step", 6), ("eval", 2)):
        one, two = losses(alone, kind), losses(folder / "whole", kind)
        assert [step for step, _ in one] == [step for step, _ in two] and len(two) == count
        assert [loss for _, loss in two] == pytest.approx([loss for _, loss in one], rel=1e-5)
    one, two = (read_checkpoint(run / "checkpoints" / "step-6")[0] for run in (alone, folder / "whole"))
    for name in one:
        if name.startswith("param/"):
            assert torch.allclose(two[name].reshape(one[name].shape), one[name], rtol=1e-4, atol=1e-6), name


def test_rank_0_speaks_for_all(job):
    folder, (first, second) = job
    said = first["whole"]["said"]
    assert all(not run["said"] for run in second.values())
    assert "as predicted on every rank, to the byte" in said and said.count("validation loss") == 3
    predicted, measured = said.split("sent to other ranks in a step: predicted ")[1].splitlines()[0].split(", measured ")
    assert predicted == measured
    last = [record for record in read_metrics(folder / "whole" / "metrics.jsonl") if record["kind"] == "step"][-1]
    assert format_bytes(last["sent_bytes"]) == measured and "host_bytes" not in last


def test_a_signal_to_one_rank_stops_all_at_one_step(job):
    folder, ranks = job
    assert [rank["stopped"]["code"] for rank in ranks] == [128 + signal.SIGTERM] * 2
    assert "SIGTERM: step 3 is saved" in ranks[0]["stopped"]["said"]
    assert [rank["resumed"]["code"] for rank in ranks] == [0, 0] and "not bit for bit" not in ranks[0]["resumed"]["said"]
    assert losses(folder / "stopped") == losses(folder / "whole") and losses(folder / "stopped", "eval") == losses(folder / "whole", "eval")
    one, other = (read_checkpoint(folder / name / "checkpoints" / "step-6")[0] for name in ("whole", "stopped"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_two_tensor_parallel_ranks_take_the_steps_of_one(job, alone):
    """Three steps at tp 2, three more at dp 2; and three at tp 2 with the sequence cut, from what dp 2 has saved."""
    folder, ranks = job
    assert [rank[name]["code"] for rank in ranks for name in ("tensor", "onward", "sequence")] == [0] * 6, ranks
    for kind in ("step", "eval"):
        expected = [(step, pytest.approx(loss, rel=1e-5)) for step, loss in losses(alone, kind)]
        assert losses(folder / "tensor", kind) == expected
        assert losses(folder / "sequence", kind) == [(step, loss) for step, loss in expected if step > 3 or (kind, step) == ("eval", 3)]
    said = ranks[0]["tensor"]["said"]
    assert "tp = 2" in said and "as predicted on every rank, to the byte" in said and not ranks[1]["tensor"]["said"]
    assert "not bit for bit: tp ranks was 2, is 1" in ranks[0]["onward"]["said"] and "tp ranks was 1, is 2" in ranks[0]["sequence"]["said"]


def test_tensor_parallel_ranks_go_on_where_they_were_stopped(job):
    folder, ranks = job
    assert [rank["tensor stopped"]["code"] for rank in ranks] == [128 + signal.SIGTERM] * 2
    assert [rank["tensor resumed"]["code"] for rank in ranks] == [0, 0] and "not bit for bit" not in ranks[0]["tensor resumed"]["said"]
    assert losses(folder / "tensor stopped") == losses(folder / "tensor")[:3]
    one, other = (read_checkpoint(folder / name / "checkpoints" / "step-3")[0] for name in ("tensor", "tensor stopped"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_one_rank_goes_on_where_two_have_stopped(job, alone):
    folder, _ = job
    path = folder / f"one-{os.getpid()}"
    out = io.StringIO()
    settings = [f"run.dir={path}", f"run.resume={folder / 'whole' / 'checkpoints' / 'step-3'}"]
    assert train(load_config(folder / "config.toml", settings), engine=packhorse, console=Console(out)) == 0
    assert "not bit for bit: ranks was 2, is 1" in out.getvalue()
    assert losses(path) == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in losses(alone)[3:]]


def test_data_that_one_rank_cannot_read_ends_all_with_the_state_saved(job):
    folder, ranks = job
    assert [rank["unreadable"]["error"] for rank in ranks] == ["DataError: rank 1: the file tokens.bin has changed"] * 2
    assert (folder / "unreadable" / "checkpoints" / "step-2").is_dir()


def test_a_loss_that_is_not_finite_ends_all_in_the_same_words(job):
    folder, (first, second) = job
    assert first["nan"]["error"].startswith("NonFiniteError: the loss of step 2 of 6") and first["nan"]["error"] == second["nan"]["error"]
    assert (folder / "nan" / "checkpoints" / "step-1").is_dir()


def test_settings_that_differ_between_ranks_are_named(job):
    folder, (first, second) = job
    assert first["seeds"]["error"] == second["seeds"]["error"]
    assert "run.seed is 1 on rank 0 and 2 on rank 1" in first["seeds"]["error"]
    assert not (folder / "seeds").exists()


def test_a_folder_that_holds_a_run_is_refused_by_all_in_the_same_words(job):
    _, ranks = job
    assert [rank["full"]["error"] for rank in ranks] == [ranks[0]["full"]["error"]] * 2
    assert ranks[0]["full"]["error"].startswith("ConfigError: run.dir = ") and "holds a run already" in ranks[0]["full"]["error"]


def test_each_rank_has_dropout_of_its_own(job):
    folder, ranks = job
    assert [rank["dropout"]["code"] for rank in ranks] == [0, 0]
    saved, _ = read_checkpoint(folder / "dropout" / "checkpoints" / "step-1")
    assert not torch.equal(saved["random/cpu"], saved["random.1/cpu"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--set", "mesh.dp=4"], "mesh.dp = 4, and the launcher has started 2 processes (WORLD_SIZE); start 4 with torchrun"),
        (["--set", "data.corpus=nowhere"], "there is no such folder"),
    ],
)
def test_a_mistake_is_one_paragraph_of_one_rank(tmp_path, settings, message):
    path = write_config(tmp_path)
    code = "from packhorse.cli.main import main; main()"
    ended = start_ranks([[sys.executable, "-c", code, "train", str(path), "--set", f"run.dir={tmp_path / 'run'}", *settings]] * 2)
    assert [code for code, _, _ in ended] == [2, 2], ended
    said = "".join(stderr for _, _, stderr in ended)
    assert said.startswith("packhorse: ") and message in said and said.count("packhorse: ") == 1 and "Traceback" not in said, said


def test_the_script_for_slurm_trains(tmp_path):
    """As docs/torchrun.md has it, on one machine, with stand-ins for what Slurm brings."""
    write_config(tmp_path).rename(tmp_path / "run.toml")
    (script,) = re.findall(r"<!-- sbatch: begin -->\n```bash\n(.*?)```", (HERE.parents[1] / "docs" / "torchrun.md").read_text(), re.S)
    (tmp_path / "job.sh").write_text(script.rstrip().replace(":29400", ":0") + f' --set run.dir="{tmp_path / "run"}" --set run.steps=2\n')
    for name, does in (("srun", 'exec "$@"'), ("scontrol", "echo localhost"), ("torchrun", f'exec {sys.executable} -m torch.distributed.run "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "job.sh"], env=os.environ | slurm, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as predicted on every rank, to the byte") == 1 and len(losses(tmp_path / "run")) == 2
