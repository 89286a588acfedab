import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.errors import ConfigError
from packhorse.train.config import Config, DataConfig, MemoryConfig, MeshConfig, OptimizerConfig, RunConfig
from packhorse.train.config_file import config_from_dict, differing_keys, format_config, load_config

pytestmark = pytest.mark.pure


def write(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_file_and_overrides_in_order(tmp_path):
    path = write(tmp_path, '[run]\nsteps = 7\n[optimizer]\nlr = 1\nbetas = [0, 0.5]\n[data]\ncorpus = "texts"\n')
    config = load_config(path, ["run.steps=8", "run.steps=9", "run.dir=out/a b", "memory.budget=2GiB", "optimizer.fused=false"])
    assert config.run == RunConfig(steps=9, dir="out/a b")
    assert config.optimizer == OptimizerConfig(lr=1.0, betas=(0.0, 0.5), fused=False)
    assert type(config.optimizer.lr) is float
    assert config.memory == MemoryConfig(budget="2GiB") and config.data == DataConfig(corpus="texts")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("memory.budget=1048576", 1048576),
        ("memory.budget=40%", "40%"),
        ('memory.budget="12"', "12"),
        ("memory.budget=minimum", "minimum"),
        ("memory.budget = 5", 5),
        ("memory.budget=a=b", "a=b"),
        ("memory.budget=5\nrun = 1", "5\nrun = 1"),
        (" memory . budget = 5", 5),
        ("memory.budget=", ""),
    ],
)
def test_values_of_overrides(tmp_path, override, value):
    assert load_config(write(tmp_path, ""), [override]).memory.budget == value


@pytest.mark.parametrize("text", ["nan", "5", "true", "2026-01-01", "[1]", "a b", "é", '"x"', "'x'"])
def test_a_key_that_takes_strings_takes_any_text(tmp_path, text):
    assert load_config(write(tmp_path, ""), [f"run.dir={text}"]).run.dir == text.strip("\"'")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\nstep = 3", "unknown key run.step; did you mean steps?"),
        ("[optimiser]\nlr = 1", "unknown section [optimiser]; did you mean optimizer?"),
        ("steps = 3", "unknown section [steps]; the sections are run, model, data, precision, optimizer, schedule, memory"),
        ("run = 3", "run is 3, expected a section"),
        ('[run]\nsteps = "3"', "run.steps is '3' (a string), expected a whole number"),
        ("[run]\nsteps = 3.0", "run.steps is 3.0 (a number), expected a whole number"),
        ("[run]\nsteps = true", "run.steps is True (true or false), expected a whole number"),
        ("[run]\nsteps = 0", "run.steps is 0, expected a number that is finite and at least 1"),
        ("[run]\ndir = 3", 'run.dir is 3 (a whole number), expected a string; write "3" in quotes'),
        ("[optimizer]\nlr = nan", "optimizer.lr is nan, expected a number that is finite and at least 0"),
        ("[optimizer]\nfused = 1", "optimizer.fused is 1 (a whole number), expected true or false"),
        ("[optimizer]\nbetas = [0.9]", "optimizer.betas is [0.9] (a list), expected a list of 2 numbers"),
        ("[optimizer]\nbetas = [0.9, 1]", "optimizer.betas is 1.0, expected a number that is finite and at least 0 and below 1"),
        ('[optimizer]\nkind = "adamm"', '"radam", "rmsprop", "rprop", "sgd"; did you mean adam?'),
        (
            '[optimizer]\nkind = "sgd"\nbetas = [0.9, 0.9]',
            "optimizer.betas means nothing for optimizer.kind = 'sgd', which has lr, weight_decay, momentum, fused",
        ),
        ('[optimizer]\nkind = "rprop"\nweight_decay = 0', "optimizer.weight_decay means nothing for optimizer.kind = 'rprop', which has lr, options"),
        ("[optimizer]\noptions = 3", "optimizer.options is 3 (a whole number), expected a table"),
        ('[schedule]\nkind = "constant"\nmin_lr = 0', "schedule.min_lr means nothing for schedule.kind = 'constant', which has warmup_steps"),
        (
            '[schedule]\nname = "StepLR"',
            "schedule.name means nothing for schedule.kind = 'cosine', which has warmup_steps, min_lr; set schedule.kind = \"torch\"",
        ),
        (
            "[schedule.options]\ngamma = 0.5",
            "schedule.options means nothing for schedule.kind = 'cosine', which has warmup_steps, min_lr; set schedule.kind = \"torch\"",
        ),
        ('[schedule]\nkind = "torch"\nname = "StepLR"\nwarmup_steps = 5', "schedule.warmup_steps means nothing for schedule.kind = 'torch'"),
        ('[schedule]\nkind = "torch"', 'schedule.kind = "torch" needs schedule.name'),
        ("[memory]\nbudget = [1]", "memory.budget is [1] (a list), expected a whole number or a string"),
        ('[memory]\nresidency = "ofload"', 'memory.residency is \'ofload\' (a string), expected one of "auto", "keep", "shard", "offload"; did you'),
        ('[memory]\nresidency = "offload"', 'memory.residency = "offload" copies saved values to the host and needs memory.host_budget'),
        ('[memory]\nresidency = "shard"', 'memory.residency = "shard", and mesh.tp = 1: what is cut is shared by the tp ranks; set mesh.tp'),
        ("[memory]\nhost_budget = true", "memory.host_budget is True (true or false), expected a whole number or a string"),
        ("[memory]\nbudget = 2026-01-01", "memory.budget is datetime.date(2026, 1, 1) (date), expected a whole number or a string"),
        ("[model]\nheads = 3", "model.width = 128 is not a multiple of model.heads = 3"),
        ("[data]\nglobal_batch_size = 20", "data.global_batch_size = 20 is not a multiple of data.micro_batch_size = 16"),
        (
            "[data]\nglobal_batch_size = 32\n[mesh]\ndp = 3",
            "data.global_batch_size = 32 is not a multiple of data.micro_batch_size = 16 times 3 ranks (mesh.dp)",
        ),
        ("[mesh]\nzero_stage = 4", "mesh.zero_stage is 4 (a whole number), expected one of 0, 1, 2, 3"),
        ("[mesh]\nzero_stage = true", "mesh.zero_stage is True (true or false), expected one of 0, 1, 2, 3"),
        ('[mesh]\nzero_stage = "3"', "mesh.zero_stage is '3' (a string), expected one of 0, 1, 2, 3"),
        ("[mesh]\ndp = 0", "mesh.dp is 0, expected a number that is finite and at least 1"),
        ("[mesh]\ntp = 0", "mesh.tp is 0, expected a number that is finite and at least 1"),
        ("[mesh]\nsequence_parallel = true", "mesh.sequence_parallel = true, and mesh.tp = 1: the sequence is shared by the tp ranks; set mesh.tp"),
        ("[mesh]\nsequence_parallel = true\ntp = 3", "data.seq_len = 128 is not a multiple of mesh.tp = 3; with mesh.sequence_parallel each"),
        ('[mesh]\ntensor_plan = "row"', "mesh.tensor_plan is 'row' (a string), expected a table"),
        (
            "[data]\nglobal_batch_size = 32\n[mesh]\ndp = 3\ntp = 2",
            "data.global_batch_size = 32 is not a multiple of data.micro_batch_size = 16 times 3 groups of ranks (mesh.dp)",
        ),
        ("[schedule]\nmin_lr = 1", "schedule.min_lr = 1.0 is above optimizer.lr = 0.001"),
        ("[run\n", "is not valid TOML"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("override", ["steps=3", "run.steps", "=", ".a=1", "run.=1"])
def test_overrides_that_cannot_be_read(tmp_path, override):
    with pytest.raises(ConfigError, match=r"expected SECTION\.KEY=VALUE"):
        load_config(write(tmp_path, ""), [override])


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path)
    (tmp_path / "raw.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "raw.toml")


@given(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.floats(0, 1e300),
    st.integers(0, 2**63 - 1),
    st.none() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
)
def test_a_printed_configuration_reads_back_equal(corpus, lr, seed, budget):
    config = Config(
        run=RunConfig(seed=seed),
        data=DataConfig(corpus=corpus),
        optimizer=OptimizerConfig(lr=1 + lr, weight_decay=lr),
        memory=MemoryConfig(budget=budget),
    )
    assert config_from_dict(tomllib.loads(format_config(config))) == config


def test_options_are_a_table_and_are_printed_as_one(tmp_path):
    text = '[optimizer]\nkind = "rmsprop"\n[optimizer.options]\nalpha = 0.9\ncentered = true\n[schedule]\nkind = "torch"\nname = "MultiStepLR"\n'
    config = load_config(write(tmp_path, text), ["schedule.options={milestones = [3, 5], gamma = 0.5}"])
    assert config.optimizer.options == {"alpha": 0.9, "centered": True}
    assert config.schedule.options == {"milestones": [3, 5], "gamma": 0.5}
    assert config_from_dict(tomllib.loads(format_config(config))) == config
    assert differing_keys(config, replace(config, optimizer=replace(config.optimizer, options={"alpha": 0.8}))) == ["optimizer.options"]


def test_a_tensor_plan_is_a_table_too(tmp_path):
    text = '[mesh]\ntp = 2\n[mesh.tensor_plan]\n"layers.*.up" = "column"\n"layers.*.qkv" = ["column", [8, 4, 4]]\n'
    config = load_config(write(tmp_path, text))
    assert config.mesh.tensor_plan == {"layers.*.up": "column", "layers.*.qkv": ["column", [8, 4, 4]]}
    assert config_from_dict(tomllib.loads(format_config(config))) == config


def test_defaults_of_an_optimizer_are_those_of_its_kind():
    assert OptimizerConfig() == OptimizerConfig(kind="adamw", weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    assert OptimizerConfig(kind="sgd") == OptimizerConfig(kind="sgd", weight_decay=0.1, momentum=0.0, fused=True)
    assert OptimizerConfig(kind="rprop").weight_decay is None and OptimizerConfig(kind="rmsprop").weight_decay == 0.0


def test_the_printed_configuration_shows_every_key_with_its_default():
    printed = format_config(Config())
    for section, values in Config().to_dict().items():
        assert f"[{section}]" in printed
        for key, value in values.items():
            assert (f"# {key} is not set" if value is None else f"\n{key} = ") in printed


def test_number_of_micro_batches_is_derived():
    data = DataConfig(micro_batch_size=4, global_batch_size=24)
    assert Config(data=data).num_micro_batches == 6
    assert Config(data=data, mesh=MeshConfig(dp=3)).num_micro_batches == 2
    assert Config(data=data, mesh=MeshConfig(dp=3, tp=4)).num_micro_batches == 2  # tp ranks work on the same samples


def test_differences_are_named():
    config = Config()
    assert differing_keys(config, config) == []
    other = replace(config, run=replace(config.run, steps=5), model=replace(config.model, width=64))
    assert differing_keys(config, other) == ["run.steps", "model.width"]


def test_configuration_data_and_schedule_need_no_torch():
    code = "import sys, packhorse.train.config_file, packhorse.train.schedule, packhorse.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_demo_is_a_configuration():
    config = load_config(Path(__file__).parents[2] / "examples" / "demo.toml")
    assert config.data.corpus == "stdlib" and config.run.resume == "auto" and config.num_micro_batches == 2


def test_the_explained_defaults_read_back_to_the_defaults(tmp_path):
    path = tmp_path / "all.toml"
    path.write_text(format_config(Config(), explained=True))
    assert load_config(path) == Config()
    assert "# [data]:" in path.read_text() and "# [precision]:" in path.read_text()
