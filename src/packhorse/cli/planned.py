"""CONFIG or RUN -> its plan, for the commands that print one."""

from collections.abc import Iterable
from pathlib import Path
from typing import cast

from packhorse.errors import ConfigError
from packhorse.planning.plan import Plan
from packhorse.train.config import Config
from packhorse.train.config_file import load_config
from packhorse.train.engine import Engine


def plan_of(path: Path, overrides: Iterable[str]) -> Plan:
    """The plan of the step that `packhorse train` would run on a TOML file, or goes on with in the folder of a run. Reads no data.

    Raises ConfigError and what `packhorse.plan` raises.
    """
    config = _config_of(path, overrides)

    import packhorse
    from packhorse.train.build import build_model, build_optimizer, build_plan

    model = build_model(config, "meta")
    return cast(Plan, build_plan(config, cast(Engine, packhorse), model, build_optimizer(config, model)))


def sizes_of(path: Path, overrides: Iterable[str]) -> str:
    """The sizes that decide what a step needs, in one line: a figure means nothing without them."""
    config = _config_of(path, overrides)
    data, model = config.data, config.model
    named = (
        model.size
        or model.config
        or ", ".join(f"{key} {value}" for key in ("layers", "width", "heads") if (value := getattr(model, key)) is not None)
    )
    micros = f"{data.num_micro_batches} micro-batch" + ("es" if data.num_micro_batches > 1 else "")
    return (
        f"one step of {model.kind} ({named}), {config.precision.compute}, {config.optimizer.kind}: {micros} of {data.micro_batch_size} samples of "
        f"{data.seq_len} tokens"
    )


def _config_of(path: Path, overrides: Iterable[str]) -> Config:
    path = path / "config.toml" if path.is_dir() else path
    if not path.exists():
        raise ConfigError(f"cannot read the configuration {path}: No such file or directory; give a TOML file, or the folder of a run")
    return load_config(path, overrides)
