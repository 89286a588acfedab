"""[optimizer] and [schedule] -> torch.optim objects. What they refuse is a ConfigError that names the key."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import lr_scheduler

from packhorse.errors import ConfigError
from packhorse.optim import OPTIMIZERS
from packhorse.train.config import OptimizerConfig, ScheduleConfig
from packhorse.train.config_file import nearest

_CLASSES = {kind.__name__.lower(): kind for kind in OPTIMIZERS}
_NOT_BY_NAME = {
    "ReduceLROnPlateau": "wants to see a metric at each step",
    "LambdaLR": "is made from a Python function",
    "MultiplicativeLR": "is made from a Python function",
    "SequentialLR": "is made from other schedulers",
    "ChainedScheduler": "is made from other schedulers",
}


def make_optimizer(settings: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The torch optimizer of [optimizer] over parameter groups. Raises ConfigError for options that its class does not have or refuses."""
    kind = _CLASSES[settings.kind]
    own = {key: value for key in ("betas", "momentum", "fused") if (value := getattr(settings, key)) is not None}
    keys = ("lr", "weight_decay", "betas", "momentum", "fused")
    options = own | _checked("optimizer", settings.options, kind, keys, hidden=("params",))
    try:
        return kind(groups, lr=settings.lr, **options)  # type: ignore[call-arg]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"torch.optim.{kind.__name__} refuses the settings of [optimizer]: {error}; correct the key or the option") from error


def make_scheduler(settings: ScheduleConfig, optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler | None:
    """The torch scheduler that [schedule] names; None where its kind is a function of the step (schedule.py).

    Raises ConfigError for a name or an option that is not known, and for schedulers that a configuration cannot describe.
    """
    if settings.kind != "torch":
        return None
    name = str(settings.name)
    if name in _NOT_BY_NAME:
        raise ConfigError(
            f"schedule.name = {name!r}: that scheduler {_NOT_BY_NAME[name]}, which a configuration cannot give; choose another, or train from Python"
        )
    known = [found for found in lr_scheduler.__all__ if found not in _NOT_BY_NAME and found != "LRScheduler"]
    if name not in known:
        raise ConfigError(f"schedule.name = {name!r} is no scheduler of torch.optim.lr_scheduler{nearest(name, known)}; known: {', '.join(known)}")
    kind = getattr(lr_scheduler, name)
    options = _checked("schedule", settings.options, kind, (), hidden=("optimizer", "last_epoch", "scale_fn"))
    try:
        return kind(optimizer, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} refuses schedule.options = {settings.options}: {error}; correct the option") from error


def _checked(section: str, options: dict[str, Any], kind: type, keys: Iterable[str], hidden: Iterable[str]) -> dict[str, Any]:
    """The options as keyword arguments of `kind`: a list is a tuple. keys: arguments that are keys of the section itself."""
    known = [name for name in inspect.signature(kind).parameters if name not in (*keys, *hidden)]
    for name in options:
        if name in keys:
            raise ConfigError(f"{section}.options has {name}, which is a key of [{section}] itself; write {section}.{name}")
        if name not in known:
            raise ConfigError(f"unknown option {section}.options.{name}{nearest(name, known)}; {kind.__name__} has {', '.join(known)}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
