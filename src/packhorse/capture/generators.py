"""The random generators that a model draws from besides torch's default one.

While a model is traced, a draw from such a generator is recorded as one from the default generator, with the name of the generator beside it: nothing
is drawn from the generator itself. A step then draws from the live object, so what seeds or winds back a generator in the model's forward would be
done once instead of at every step. It is found out by seeds that nobody else knows, and refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator
from torch.utils._python_dispatch import _disable_current_modes

from packhorse.errors import CaptureError

_FIRST_SEED = 0x7061636B  # of those that generators hold while a model is traced


def generators_of(model: torch.nn.Module) -> dict[str, Generator]:
    """ "generator path" -> generator, for each distinct one that is an attribute of a module."""
    found: dict[int, tuple[str, Generator]] = {}
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Generator) and not _is_default(value):
                found.setdefault(id(value), (f"generator {path}{'.' if path else ''}{attribute}", value))
    return dict(found.values())


class Generators:
    """Those of one model while it is traced. `named`: name -> generator, of its attributes and of others that it draws from ("generator 0", ...)."""

    def __init__(self, model: torch.nn.Module):
        self.named = generators_of(model)
        self._expected: dict[str, int] = {}  # name -> the seed that it holds now
        self._states: dict[str, torch.Tensor] = {}  # name -> the state that it had before
        self._count = 0
        self._num_forwards = 0

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Around a trace: every generator has its state back at the end."""
        try:
            for name, generator in self.named.items():
                self._take(name, generator)
            self._reseed("default", torch.default_generator)
            yield
        finally:
            for name, state in self._states.items():
                self.named[name].set_state(state)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around each forward pass of the trace."""
        yield
        self._num_forwards += 1
        for name, generator in self.named.items():
            self._check(name, generator, "its end")

    def hide(self, args: tuple, kwargs: dict[str, Any], place: str) -> tuple[tuple, dict[str, Any], str | None]:
        """A call's arguments with None for its generator, and that one's name; as they are, and None, where it draws from the default one or nothing.

        Raises CaptureError naming `place` if the generator is not as the draw before left it.
        """
        self._check("default", torch.default_generator, place)
        given = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, Generator)), None)
        if given is None:
            return args, kwargs, None
        hidden = tuple(None if arg is given else arg for arg in args), {key: None if arg is given else arg for key, arg in kwargs.items()}
        if _is_default(given):
            return *hidden, None
        name = next((name for name, generator in self.named.items() if generator is given), None)
        if name is None:
            if self._num_forwards:  # each forward makes another one
                raise CaptureError(
                    f"the training step cannot be captured: {place} makes a torch.Generator in the forward pass, which would be made once and not at "
                    "every step; make it in __init__, as an attribute of the module"
                )
            name = f"generator {sum(name.split()[1].isdigit() for name in self.named)}"
            self.named[name] = given
            self._take(name, given)
        else:
            self._check(name, given, place)
            self._reseed(name, given)
        return *hidden, name

    def _take(self, name: str, generator: Generator) -> None:
        with _disable_current_modes():  # a state is a tensor, and a real one
            self._states[name] = generator.get_state()
        self._reseed(name, generator)

    def _reseed(self, name: str, generator: Generator) -> None:
        self._count += 1
        self._expected[name] = _FIRST_SEED + self._count
        generator.manual_seed(self._expected[name])

    def _check(self, name: str, generator: Generator, place: str) -> None:
        if generator.initial_seed() != self._expected[name]:
            which = "torch's default generator" if name == "default" else f"the {name}"
            raise CaptureError(
                f"the training step cannot be captured: the forward pass seeds {which} or sets its state (seen at {place}), which would be done once "
                "and not at every step; draw such numbers once, outside of the model, and register them as a buffer, or seed before the step"
            )


def _is_default(generator: Generator) -> bool:
    """One of torch's own: of the host, or of a GPU."""
    return generator is torch.default_generator or any(generator is other for other in torch.cuda.default_generators)
