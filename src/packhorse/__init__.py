"""packhorse: a training step as one graph, planned to the byte, then run exactly as planned.

    plan = packhorse.plan(model, batch, optimizer=optimizer)
    step = packhorse.compile(model, plan)
    loss = step(batch)

Names are imported when first used, so that the command's help needs no torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "plan": "packhorse.api",
    "compile": "packhorse.api",
    "Mesh": "packhorse.mesh",
    "deferred": "packhorse.runtime.deferred",
    "Elementwise": "packhorse.optim.elementwise",
    "Needs": "packhorse.optim.elementwise",
    "save": "packhorse.checkpoint.step",
    "load": "packhorse.checkpoint.step",
    "keep": "packhorse.capture.marks",
    "drop": "packhorse.capture.marks",
    **dict.fromkeys(
        ("UserError", "BatchError", "BudgetError", "CaptureError", "CheckpointError", "ConfigError", "DataError", "NonFiniteError", "PeerError"),
        "packhorse.errors",
    ),
}

__all__ = ["Mesh", "UserError", "compile", "deferred", "drop", "keep", "load", "plan", "save"]  # the kinds of UserError are there too


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'packhorse' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])
