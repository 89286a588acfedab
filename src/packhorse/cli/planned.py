"""CONFIG -> its plan, for the commands that print one."""

from collections.abc import Iterable
from pathlib import Path
from typing import cast

from packhorse.planning.plan import Plan
from packhorse.train.config_file import load_config
from packhorse.train.engine import Engine


def plan_of(path: Path, overrides: Iterable[str]) -> Plan:
    """The plan of the step that `packhorse train` would run. Reads no data. Raises ConfigError and what `packhorse.plan` raises."""
    config = load_config(path, overrides)

    import packhorse
    from packhorse.train.build import build_model, build_optimizer, build_plan

    model = build_model(config, "meta")
    return cast(Plan, build_plan(config, cast(Engine, packhorse), model, build_optimizer(config, model)))
