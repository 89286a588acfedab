"""`packhorse bench NAME ...` -> packhorse.bench.NAME, imported only when it is run.

Each benchmark is a module with `run(arguments: list[str], *, as_json: bool) -> int`: the words after NAME, and the exit code.
"""

import importlib

from packhorse.errors import UserError

NAMES = (
    "step",
    "models",
    "zoo",
    "capture",
    "layout",
    "gpu",
    "frontier",
    "batch",
    "by-hand",
    "equality",
    "peers",
    "overlap",
    "residency",
    "strategies",
)


def run_bench(name: str, arguments: list[str], *, as_json: bool) -> int:
    """Runs the benchmark `name` and returns its exit code. Raises UserError if there is none of that name."""
    if name not in NAMES:
        raise UserError(f"there is no benchmark {name!r}; the benchmarks are {', '.join(NAMES)}")
    return importlib.import_module(f"packhorse.bench.{name.replace('-', '_')}").run(arguments, as_json=as_json)
