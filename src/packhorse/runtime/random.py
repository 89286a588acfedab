"""The random state that a step draws from: torch's default generators, of the host and of the step's device."""

import torch
from torch import Tensor


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Generator name ("cpu", "cuda") -> its state, as bytes."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: dict[str, Tensor], device: torch.device) -> None:
    """Puts back what `random_state` gave; the device's part only where there is such a device."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
