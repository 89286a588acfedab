"""Random states of several ranks in one checkpoint, and which of them a rank goes on with.

Rank 0's are named "random/cpu", as one rank's are, those of rank 3 "random.3/cpu". A rank that the saving job did not have starts at a seed made of
rank 0's state and its own number: reproducible, and another stream than that of every other rank.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import Generator, Tensor

_FIRST = "random/"


def of_other_ranks(name: str) -> bool:
    """A tensor of a checkpoint is a random state of another rank than 0."""
    word, slash, _ = name.partition("/")
    return bool(slash) and word.startswith("random.") and word.removeprefix("random.").isdecimal()


def is_random(name: str) -> bool:
    """A tensor of a checkpoint is a random state."""
    return as_rank_0s(name).startswith(_FIRST)


def as_rank_0s(name: str) -> str:
    """random.3/cpu -> random/cpu; any other name stays."""
    return _FIRST + name.partition("/")[2] if of_other_ranks(name) else name


def named(states: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Generator -> state of a rank, under their names in a checkpoint."""
    return {_prefix(rank) + generator: state for generator, state in states.items()}


def resumed(tensors: Mapping[str, Tensor], rank: int, devices: Mapping[str, torch.device]) -> dict[str, Tensor]:
    """Generator -> the state that it goes on with on this rank. tensors: of a checkpoint; devices: of the generators."""
    found = {}
    for generator in (name.removeprefix(_FIRST) for name in tensors if name.startswith(_FIRST)):
        own = _prefix(rank) + generator
        found[generator] = tensors[own] if own in tensors else _derived(tensors[_FIRST + generator], rank, devices[generator])
    return found


def _prefix(rank: int) -> str:
    return f"random.{rank}/" if rank else _FIRST


def _derived(state: Tensor, rank: int, device: torch.device) -> Tensor:
    digest = hashlib.sha256(state.cpu().numpy().tobytes() + f" rank {rank}".encode()).digest()
    return Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1).get_state()
