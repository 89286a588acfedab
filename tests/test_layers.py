"""What may import what: the pure folders need no torch, and data flows one way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure
SOURCE = Path(__file__).parent.parent / "src" / "packhorse"
PURE = ["graph", "memory", "device", "parallel", "planning", "program", "report", "mesh", "units", "errors"]
# folders in the order of the data: a folder imports none that comes after it
ORDER = ["graph", "memory", "planning", "program", "optim", "capture", "runtime"]


def modules(folder):
    path = SOURCE / folder
    return [path.with_suffix(".py")] if path.with_suffix(".py").exists() else sorted(path.glob("*.py"))


@pytest.mark.parametrize("folder", PURE)
def test_pure_folders_do_not_import_torch(folder):
    names = [".".join(("packhorse", *p.relative_to(SOURCE).with_suffix("").parts)) for p in modules(folder)]
    code = f"import sys, importlib\nfor n in {names!r}: importlib.import_module(n)\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_listed_before_any_is_imported():
    code = (
        "import sys, packhorse\nnames = dir(packhorse)\nassert {'plan', 'compile', 'save', 'load', 'Mesh', 'CaptureError'} <= set(names), names\n"
        "assert not {'Any', 'import_module'} & set(names) and 'torch' not in sys.modules\nassert all(getattr(packhorse, name) for name in names)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("packhorse."):
            yield node.module.split(".")[1]


@pytest.mark.parametrize("folder", ORDER)
def test_a_stage_knows_nothing_of_later_ones(folder):
    later = set(ORDER[ORDER.index(folder) + 1 :])
    for path in modules(folder):
        assert not later & set(imported(path)), path
