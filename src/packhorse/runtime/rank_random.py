"""Random states of several ranks in one checkpoint, which of them a rank goes on with, and the two streams that tensor parallel ranks draw from.

A state has the place of its rank in the mesh in its name. That of dp rank 0 is named "random/cpu", as one rank's is, that of dp rank 3
"random.3/cpu", and that of tp rank 1 beside it "random.3.1/cpu". A rank that the saving job did not have starts at a seed made of the state of the
first rank and its own place: reproducible, and another stream than that of every other rank.

With several tp ranks no graph draws from torch's default generator (Shoeybi et al. 2019, appendix B.2): draws on values that every tp rank has alike
come from the generator "outside", in the same state on all tp ranks of a dp rank, and draws on values that are cut from "inside", which is in another
state on each. Generators of the model's own are in the same state on all tp ranks too.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import Generator, Tensor

from packhorse.parallel.tensor.spread import INSIDE, OUTSIDE

_FIRST = "random/"


def streams(state: Tensor, dp_rank: int, tp_rank: int, device: torch.device) -> dict[str, Generator]:
    """The two generators of a rank, by name. state: of the default generator of this dp rank's first tp rank."""
    words = {OUTSIDE: f"{OUTSIDE} {dp_rank}", INSIDE: f"{INSIDE} {dp_rank}.{tp_rank}"}
    return {name: _seeded(state, said, device) for name, said in words.items()}


def may_be_absent(name: str) -> bool:
    """A tensor of a checkpoint is a random state that a job on another mesh does not have: of another rank than the first, or of the two streams."""
    return _of_other_ranks(name) or name in (_FIRST + OUTSIDE, _FIRST + INSIDE)


def is_random(name: str) -> bool:
    """A tensor of a checkpoint is a random state."""
    return as_rank_0s(name).startswith(_FIRST)


def as_rank_0s(name: str) -> str:
    """random.3.1/cpu -> random/cpu; any other name stays."""
    return _FIRST + name.partition("/")[2] if _of_other_ranks(name) else name


def named(states: Mapping[str, Tensor], dp_rank: int, tp_rank: int = 0) -> dict[str, Tensor]:
    """Generator -> state of a rank, under their names in a checkpoint. What all tp ranks have alike, the first one names."""
    return {_prefix(dp_rank, tp_rank) + name: state for name, state in states.items() if not tp_rank or not _is_alike(name)}


def resumed(tensors: Mapping[str, Tensor], devices: Mapping[str, torch.device], dp_rank: int, tp_rank: int = 0) -> dict[str, Tensor]:
    """Generator -> the state that it goes on with on this rank. tensors: of a checkpoint; devices: of the generators that this rank has.

    A checkpoint of one tp rank has no streams, nor has one from another kind of device any of use here: they start as in a new job, from the default
    generator's state.
    """
    found = {}
    for name in (stored.removeprefix(_FIRST) for stored in tensors if stored.startswith(_FIRST)):
        if name not in (OUTSIDE, INSIDE):
            found[name] = _own_or_derived(tensors, name, devices[name], dp_rank, 0 if _is_alike(name) else tp_rank)
    if OUTSIDE not in devices:
        return found
    device = devices[OUTSIDE]
    default = "cuda" if device.type == "cuda" and _FIRST + "cuda" in tensors else "cpu"
    new = streams(_own_or_derived(tensors, default, devices[default], dp_rank, 0), dp_rank, tp_rank, device)
    for name, place in ((OUTSIDE, (dp_rank, 0)), (INSIDE, (dp_rank, tp_rank))):
        found[name] = new[name].get_state()
        if _FIRST + name in tensors and len(tensors[_FIRST + name]) == len(found[name]):
            found[name] = _own_or_derived(tensors, name, device, *place)
    return found


def _is_alike(name: str) -> bool:
    """All tp ranks of a dp rank have this generator in one state."""
    return name not in ("cpu", "cuda", INSIDE)


def _of_other_ranks(name: str) -> bool:
    word, slash, _ = name.partition("/")
    place = word.removeprefix("random.")
    return bool(slash) and place != word and all(number.isdecimal() for number in place.split(".", 1))


def _own_or_derived(tensors: Mapping[str, Tensor], name: str, device: torch.device, dp_rank: int, tp_rank: int) -> Tensor:
    own = _prefix(dp_rank, tp_rank) + name
    place = f"{dp_rank}.{tp_rank}" if tp_rank else f"{dp_rank}"
    return tensors[own] if own in tensors else _seeded(tensors[_FIRST + name], f"rank {place}", device).get_state()


def _prefix(dp_rank: int, tp_rank: int) -> str:
    if tp_rank:
        return f"random.{dp_rank}.{tp_rank}/"
    return f"random.{dp_rank}/" if dp_rank else _FIRST


def _seeded(state: Tensor, words: str, device: torch.device) -> Generator:
    digest = hashlib.sha256(state.cpu().numpy().tobytes() + f" {words}".encode()).digest()
    return Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
