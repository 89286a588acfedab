import json
import resource
import subprocess
import sys

import pytest
import typer

from packhorse.cli.main import app

pytestmark = pytest.mark.cpu

PACKHORSE = "from packhorse.cli.main import main; main()"


def packhorse(*arguments, code=PACKHORSE, cwd=None):
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, cwd=cwd)


def test_help_does_not_import_torch_and_is_quick():
    code = (
        "import sys\nfrom packhorse.cli.main import main\ntry:\n    main()\nfinally:\n"
        "    print('IMPORTED', sorted({'torch', 'numpy', 'safetensors', 'plotext'} & sys.modules.keys()))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = packhorse("--help", code=code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and "IMPORTED []" in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3  # CPU seconds: about 0.4 on an idle machine
    for command in ("plan", "train", "explain", "report", "sample", "doctor", "bench", "ckpt"):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "missing.toml"], "missing.toml: No such file"),
        (["plan", "missing.toml"], "missing.toml: No such file or directory; give a TOML file, or the folder of a run"),
        (["explain", "missing.toml"], "missing.toml: No such file or directory; give a TOML file, or the folder of a run"),
        (["report", "missing.toml"], "missing.toml: No such file or directory; give a TOML file, or the folder of a run"),
        (["report", "a.toml", "--out", "nowhere/report.html"], "there is no folder nowhere; make it first"),
        (["plan", "full"], "full/config.toml: No such file"),
        (["explain", "missing.toml", "--stage", "graf"], "expected one of graph, plan, program"),
        (["train", "a.toml", "--set", "optimizer.lrr=1"], "did you mean lr?"),
        (["train", "a.toml", "--set", "data.corpus=nowhere"], "there is no such folder"),
        (["train", "a.toml", "--resume", "none"], "'full' holds a run already"),
        (["bench", "nothing"], "the benchmarks are step"),
        (["calibrate", "--threads", "0"], "--threads is 0, expected 1 or more"),
        (["calibrate", "--ranks", "1"], "--ranks is 1, expected 2 or more"),
        (["calibrate", "--write", "nowhere/cpu.toml"], "nowhere/cpu.toml: No such file or directory"),
        (["bench", "step", "--rounds", "0"], "packhorse: bench step: --rounds 0"),
        (["sample", "nowhere", "--prompt", "a"], "nowhere is not the folder of a run"),
        (["ckpt", "ls", "nowhere"], "there is no folder nowhere"),
        (["ckpt", "verify", "full"], "full holds no checkpoints"),
    ],
)
def test_mistakes_are_one_paragraph_and_exit_code_2(tmp_path, arguments, message):
    (tmp_path / "a.toml").write_text('[run]\ndir = "full"\n' if "--resume" in arguments else "")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "metrics.jsonl").touch()
    done = packhorse(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("packhorse: ") and done.stderr.count("\n") == 1
    assert message in done.stderr and "Traceback" not in done.stderr


def test_doctor():
    facts = json.loads(packhorse("doctor", "--json").stdout)
    import torch

    assert facts["torch"] == torch.__version__ and facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["memory GiB"] > 0 and facts["cores"] >= 1 and facts["disk free GiB"] >= 0
    text = packhorse("doctor").stdout
    assert all(name in text for name in facts)


def test_every_printing_command_has_json_and_no_option_begins_one_of_torchruns():
    from torch.distributed.run import get_args_parser

    torchrun = {option for action in get_args_parser()._actions for option in action.option_strings} - {"--help", "-h"}
    commands = dict(typer.main.get_command(app).commands)
    assert set(commands) == {"plan", "train", "explain", "report", "sample", "config", "doctor", "bench", "ckpt", "calibrate", "reproduce"}
    commands |= commands.pop("ckpt").commands
    assert {"ls", "verify", "to-hf", "from-hf"} <= set(commands)
    for name, command in commands.items():
        names = [name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]]
        options = {name for name in names if name.startswith("-")}
        assert "--json" in options, name
        for option in options - {"--help"}:
            assert not any(theirs.startswith(option) for theirs in torchrun), option


def test_a_benchmark_gets_the_words_after_its_name(monkeypatch):
    import types

    from packhorse.cli.benches import run_bench

    seen = {}
    module = types.ModuleType("packhorse.bench.step")
    module.run = lambda arguments, *, as_json: seen.update(arguments=arguments, as_json=as_json) or 3
    monkeypatch.setitem(sys.modules, "packhorse.bench.step", module)
    assert run_bench("step", ["--pairs", "5"], as_json=True) == 3
    assert seen == {"arguments": ["--pairs", "5"], "as_json": True}
