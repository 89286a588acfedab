"""The random state that a step draws from: torch's default generators, of the host and of the step's device, and those of the model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator, Tensor


def random_state(device: torch.device, generators: dict[str, Generator]) -> dict[str, Tensor]:
    """Generator name ("cpu", "cuda", and the names of `generators`) -> its state, as bytes."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states | {name: generator.get_state() for name, generator in generators.items()}


def set_random_state(states: dict[str, Tensor], device: torch.device, generators: dict[str, Generator]) -> None:
    """Puts back what `random_state` gave; the device's part only where there is such a device."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    for name, generator in generators.items():
        generator.set_state(states[name])


def default_generator(device: torch.device) -> Generator:
    """torch's own of a device."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


def save_random_state(outs, scratch, generator: Generator | None = None) -> None:
    """Recipe of packhorse.random_state: the state of the generator; None: the default one of the device that the result lies on."""
    state = (generator or default_generator(outs[0].device)).get_state()
    outs[0][: state.numel()].copy_(state)


@contextmanager
def drawing_from(saved: Tensor, generator: Generator | None = None) -> Iterator[None]:
    """Inside, draws come from a saved state; the generator itself (None: as in save_random_state) is left as it was."""
    generator = generator or default_generator(saved.device)
    before = generator.get_state()
    generator.set_state(saved[: before.numel()].cpu().clone())  # a generator reads a tensor from the start of its storage
    try:
        yield
    finally:
        generator.set_state(before)


@contextmanager
def drawing_as(stream: Generator) -> Iterator[None]:
    """Inside, torch's default generator of the stream's device goes on where the stream is; after it the stream has gone on, and the default one is
    as it was. So any operator can draw from the stream: many, such as dropout, take no generator."""
    default = default_generator(stream.device)
    before = default.get_state()
    default.set_state(stream.get_state())
    try:
        yield
    finally:
        stream.set_state(default.get_state())
        default.set_state(before)
