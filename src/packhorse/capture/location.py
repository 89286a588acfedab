"""Where in the user's program an operator was called: the path of the module whose forward runs, and file:line of the user's code.

A TorchFunctionMode sees every call of a torch function, hooks on the modules follow the path. Both are written into the trace through
`torch.fx.traceback.annotate`, which autograd carries over to the nodes of the backward pass. So are a user's marks (capture/marks.py), and the
generator that a call draws from (capture/generators.py).
"""

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch
from torch.fx.traceback import annotate
from torch.overrides import TorchFunctionMode

from packhorse.capture.generators import Generators
from packhorse.capture.marks import mark_of

# Frames of these folders are plumbing, never the user's code; packhorse.models is a model like any other.
_OWN = Path(__file__).parent.parent
_PLUMBING = (str(Path(torch.__file__).parent), *(str(_OWN / part) for part in ("capture", "runtime", "api.py")))


def user_line(frame: FrameType | None) -> str:
    """ "file.py:12" of the innermost frame outside torch and packhorse; "" if there is none."""
    while frame is not None and (frame.f_code.co_filename.startswith(_PLUMBING) or frame.f_code.co_filename.startswith("<")):
        frame = frame.f_back
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def user_line_of(trace: TracebackType | None) -> str:
    """The same for an exception's traceback: the last frame of the user's code that it passed through."""
    found = ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not (name.startswith(_PLUMBING) or name.startswith("<")):
            found = f"{Path(name).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def host_random_state() -> int:
    """Equal to an earlier one if neither Python's nor numpy's global generator has drawn since."""
    numpys: Any = np.random.get_state()
    return hash((random.getstate(), numpys[1].tobytes(), *numpys[2:]))


def place_of(module: str, source: str) -> str:
    """Both as messages say them."""
    return f"module {module or '(outermost)'!r} at {source or 'an unknown line'}"


class Location(TorchFunctionMode):
    """While active, annotates every operator with module path and source line. `failed_module` is where an exception passed first;
    `drawing_module` the innermost one whose forward drew from Python's or numpy's generators."""

    def __init__(self, generators: Generators, marking: bool) -> None:
        """marking: marks are written down; else they do nothing."""
        super().__init__()
        self.generators, self.marking = generators, marking
        self.marks: set[tuple[str, str]] = set()  # (module, source) of each call of a mark
        self.path: list[str] = [""]
        self.failed_module: str | None = None
        self.drawing_module: str | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        note = {"module": self.path[-1], "source": user_line(sys._getframe(1))}
        if mark := mark_of(func, args):
            if not self.marking:
                return args[0]
            self.marks.add((note["module"], note["source"]))
            func, args, kwargs = torch.ops.aten.alias.default, args[:1], {}
            note |= {"mark": mark[0], "mark_name": mark[1]}
        else:
            args, kwargs, generator = self.generators.hide(args, kwargs, place_of(**note))
            if generator is not None:
                note["generator"] = generator
        with annotate(note):
            return func(*args, **kwargs)

    @contextmanager
    def inside(self, model: torch.nn.Module) -> Iterator[None]:
        """Follows the modules of `model` by hooks that are removed at the end."""
        handles = []

        before = host_random_state()

        def enter(path):
            return lambda module, args: self.path.append(path)

        def leave(module, args, output):
            if self.drawing_module is None and host_random_state() != before:
                self.drawing_module = self.path[-1]
            if sys.exc_info()[0] is not None and self.failed_module is None:
                self.failed_module = self.path[-1]
            self.path.pop()

        for path, module in model.named_modules():
            if path:
                handles.append(module.register_forward_pre_hook(enter(path)))
                handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            with self:
                yield
            if self.drawing_module is None and host_random_state() != before:
                self.drawing_module = ""
        finally:
            for handle in handles:
                handle.remove()
            del self.path[1:]
