"""Records of metrics.jsonl -> TensorBoard and Weights & Biases, where [run] asks for them. x is the step.

A sink gets the very records that metrics.jsonl gets, so no step twice and none left out, however often a run is resumed; one that is turned on
later first gets what metrics.jsonl holds already. A sink that fails is said once and left out: training and checkpoints go on.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, Self

from packhorse.errors import ConfigError
from packhorse.train.config import Config
from packhorse.train.metrics import PLOTTED, Record, kept_records
from packhorse.train.run_folder import RunFolder
from packhorse.train.to_tensorboard import TensorBoard
from packhorse.train.to_wandb import WeightsAndBiases


class Sink(Protocol):
    """One place that records go to. Each call may raise whatever its library raises. `found_earlier`: it holds records of this run already."""

    found_earlier: bool

    def write(self, record: Record) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class Sinks:
    """`with Sinks(...) as sinks:` call it with a record. `openers`: name -> what opens that sink; `earlier`: records of before."""

    def __init__(self, openers: dict[str, Callable[[], Sink]], earlier: Iterable[Record], say: Callable[[str], None]) -> None:
        self._say = say
        self._open: dict[str, Sink] = {}
        for name, opener in openers.items():
            with self._guarded(name):
                sink = self._open[name] = opener()
                for record in () if sink.found_earlier else earlier:
                    sink.write(record)

    def __call__(self, record: Record) -> None:
        for name, sink in list(self._open.items()) if record["kind"] in PLOTTED else ():
            with self._guarded(name):
                sink.write(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name, sink in list(self._open.items()):
            with self._guarded(name):
                sink.close(failed=error is not None)

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a library of others, a network, a disk: nothing that it raises may end a run
            self._open.pop(name, None)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._say(f"{name} failed and gets no more records ({reason}); training goes on, and metrics.jsonl has all of them")


def open_sinks(config: Config, folder: RunFolder, steps_done: int, say: Callable[[str], None]) -> Sinks:
    """The sinks that [run] asks for, at `steps_done`, with what metrics.jsonl holds up to there."""
    openers: dict[str, Callable[[], Sink]] = {}
    if config.run.tensorboard:
        openers["TensorBoard"] = lambda: TensorBoard(folder.root / "tensorboard", steps_done)
    if config.run.wandb:
        openers["Weights & Biases"] = lambda: WeightsAndBiases(folder.root, config.to_dict())
    return Sinks(openers, kept_records(folder.metrics, steps_done), say)


def require_sinks(config: Config) -> None:
    """Raises ConfigError naming the extra to install if a sink that [run] asks for is not installed."""
    for key, asked, installed in (
        ("tensorboard", config.run.tensorboard, TensorBoard.is_installed),
        ("wandb", config.run.wandb, WeightsAndBiases.is_installed),
    ):
        if asked and not installed():
            raise ConfigError(
                f"run.{key} = true needs the package {key}, which is not installed; install it with pip install 'packhorse[{key}]', "
                f"or train without it by --set run.{key}=false (metrics.jsonl has every record in any case)"
            )
