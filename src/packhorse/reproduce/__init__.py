"""`packhorse reproduce NAME ...`: the figures of the papers that packhorse builds on, beside what it plans and measures itself.

Each is a module with `run(arguments: list[str], *, as_json: bool) -> int`: the words after NAME, and the exit code.
"""

import importlib

from packhorse.errors import UserError

NAMES = ("chen", "megatron", "zero")


def run_reproduction(name: str, arguments: list[str], *, as_json: bool) -> int:
    """Runs it and returns its exit code. Raises UserError if there is none of that name."""
    if name not in NAMES:
        raise UserError(f"there is nothing to reproduce by the name {name!r}; the names are {', '.join(NAMES)}")
    return importlib.import_module(f"packhorse.reproduce.{name}").run(arguments, as_json=as_json)
