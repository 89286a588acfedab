"""How this process was started: alone, or by a launcher such as torchrun as one of several. No torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from packhorse.errors import ConfigError
from packhorse.train.config import Config


@dataclass(frozen=True)
class Launched:
    """This process is number `rank` of `num_ranks` in the job, and number `local_rank` of `local_num_ranks` on this machine."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    local_num_ranks: int = 1

    @property
    def neighbours(self) -> range:
        """The ranks on this machine, which share its memory."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_num_ranks)


def launched(environment: Mapping[str, str] = os.environ) -> Launched:
    """What RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE say; without WORLD_SIZE this process is alone, without the last two on its machine.

    Raises ConfigError where they are no numbers, or contradict each other.
    """
    if "WORLD_SIZE" not in environment:
        return Launched()
    given = {
        name: environment.get(name, default) for name, default in (("RANK", ""), ("WORLD_SIZE", ""), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
    }
    if all(text.isdecimal() for text in given.values()):
        found = Launched(*map(int, given.values()))
        if found.rank < found.num_ranks and found.local_rank < found.local_num_ranks <= found.num_ranks and found.local_rank <= found.rank:
            return found
    seen = ", ".join(f"{name}={text}" if text else f"{name} not set" for name, text in given.items())
    raise ConfigError(
        f"the launcher's environment does not say which rank this process is: {seen}; start it with torchrun, or set RANK below WORLD_SIZE (and "
        "LOCAL_RANK below LOCAL_WORLD_SIZE) in every process; packhorse doctor shows what is set"
    )


def spread(config: Config, here: Launched) -> Config:
    """`config` with mesh.dp such that dp times tp are as many ranks as were started.

    Raises ConfigError if it says another number, or the batch cannot be divided among them.
    """
    mesh, started = config.mesh, here.num_ranks
    dp = max(started // mesh.tp, 1) if mesh.dp is None else mesh.dp
    if (asked := dp * mesh.tp) != started:
        tp = next(tp for tp in range(min(mesh.tp, started), 0, -1) if started % tp == 0)
        degrees = {"mesh.dp": (mesh.dp, started // tp), "mesh.tp": (mesh.tp if mesh.tp > 1 else None, tp)}
        said = " and ".join(f"{name} = {degree}" for name, (degree, _) in degrees.items() if degree is not None)
        fits = " ".join(f"--set {name}={other}" for name, (degree, other) in degrees.items() if degree is not None)
        seen = "this process was started alone" if started == 1 else f"the launcher has started {started} processes (WORLD_SIZE)"
        command = f"torchrun --standalone --nproc-per-node {asked} -m packhorse train ..." if asked != 1 else "packhorse train ..."
        raise ConfigError(f"{said}, and {seen}; start {'one' if asked == 1 else asked} with {command}, or take what was started with {fits}")
    return replace(config, mesh=replace(mesh, dp=dp))
