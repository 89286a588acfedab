"""CONFIG or RUN -> its plan, for the commands that print one. A plan of several ranks needs no processes."""

from collections.abc import Iterable
from pathlib import Path
from typing import cast

from packhorse.errors import ConfigError, UserError
from packhorse.planning.plan import Plan
from packhorse.train.config import Config
from packhorse.train.config_file import load_config
from packhorse.train.engine import Engine

_MOST_PLANNED = 8  # ranks, which differ by little


def plan_of(path: Path, overrides: Iterable[str], gpus: int | None = None) -> Plan:
    """Rank 0's plan of the step that `packhorse train` would run on a TOML file, or goes on with in the folder of a run. Reads no data.

    gpus: as `config_of`. Raises ConfigError and what `packhorse.plan` raises.
    """
    return _planned(config_of(path, overrides, gpus), 0)


def largest_peak(config: Config) -> tuple[int, int, int]:
    """(rank, its peak in bytes, ranks that were planned) of the rank that needs the most: shards of a model are equal, what lies in them is not.

    Of more than 8 ranks, 8 are planned that lie evenly among them.
    """
    world = config.ranks.world_size
    count = min(world, _MOST_PLANNED)
    ranks = [index * (world - 1) // max(count - 1, 1) for index in range(count)]
    peak, rank = max((_planned(config, rank).peak_bytes, -rank) for rank in ranks)
    return -rank, peak, count


def config_of(path: Path, overrides: Iterable[str], gpus: int | None = None) -> Config:
    """The settings of a TOML file, or of a run. gpus: ranks in all, whatever mesh.dp says. Raises ConfigError."""
    path = path / "config.toml" if path.is_dir() else path
    if not path.exists():
        raise ConfigError(f"cannot read the configuration {path}: No such file or directory; give a TOML file, or the folder of a run")
    if gpus is not None and gpus < 1:
        raise UserError(f"--gpus is {gpus}, expected 1 or more")
    overrides = list(overrides)
    if gpus is None:
        return load_config(path, overrides)
    tp = load_config(path, [*overrides, "mesh.dp=1"]).mesh.tp
    if gpus % tp:
        raise ConfigError(f"--gpus is {gpus}, and mesh.tp = {tp} of them share a model; give a multiple of {tp}, or another mesh.tp")
    return load_config(path, [*overrides, f"mesh.dp={gpus // tp}"])


def sizes_of(path: Path, overrides: Iterable[str], gpus: int | None = None) -> str:
    """The sizes that decide what a step needs, in one line: a figure means nothing without them."""
    config = config_of(path, overrides, gpus)
    data, model, mesh = config.data, config.model, config.ranks
    named = (
        model.size
        or model.config
        or ", ".join(f"{key} {value}" for key in ("layers", "width", "heads") if (value := getattr(model, key)) is not None)
    )
    micros = f"{config.num_micro_batches} micro-batch" + ("es" if config.num_micro_batches > 1 else "")
    ranks = f" on each of {mesh.dp} ranks" if mesh.dp > 1 else ""
    if mesh.tp > 1:
        sequence = " and the sequence" if config.mesh.sequence_parallel else ""
        ranks = f" in each of {mesh.dp} group{'s' * (mesh.dp > 1)} of {mesh.tp} ranks that share matrices{sequence} (dp {mesh.dp}, tp {mesh.tp})"
    ranks += f", ZeRO stage {config.mesh.zero_stage}" if mesh.world_size > 1 else ""
    return (
        f"one step of {model.kind} ({named}), {config.precision.compute}, {config.optimizer.kind}: {micros} of {data.micro_batch_size} samples of "
        f"{data.seq_len} tokens{ranks}"
    )


def _planned(config: Config, rank: int) -> Plan:
    import packhorse
    from packhorse.train.build import build_model, build_optimizer, build_plan

    model = build_model(config, "meta")
    return cast(Plan, build_plan(config, cast(Engine, packhorse), model, build_optimizer(config, model), rank))
