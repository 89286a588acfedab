"""The settings of a run: what a configuration file may say, and what each key means. No torch."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from packhorse.errors import ConfigError

Recompute = Literal["auto", "none", "cheap", "sqrt", "chen", "recursive", "blocks", "optimal", "milp"]


def _setting(default: Any, *, least: float | None = None, below: float | None = None) -> Any:
    """A key with a default and the range [least, below) of its values."""
    return field(default=default, metadata={"least": least, "below": below})


@dataclass(frozen=True)
class RunConfig:
    """[run]: where, how long, how often. Steps are optimizer steps; 0 for an interval means never."""

    dir: str = "runs/run"
    seed: int = _setting(1, least=0, below=2**63)
    steps: int = _setting(1000, least=1)
    log_every: int = _setting(10, least=1)
    eval_every: int = _setting(100, least=0)
    eval_batches: int = _setting(8, least=1)
    save_every: int = _setting(200, least=0)
    keep_last: int = _setting(2, least=1)
    resume: str = "none"  # "auto", "none", or the path of a checkpoint
    threads: int | None = _setting(None, least=1)  # of torch on the CPU; the bits of a sum depend on it. Without it torch's own choice
    peak_flops: float | None = _setting(None, least=1)  # of the device, a second; without it MFU is N/A


@dataclass(frozen=True)
class ModelConfig:
    """[model]: a GPT over bytes. `width` channels in `heads` heads, `layers` blocks."""

    kind: Literal["gpt"] = "gpt"
    layers: int = _setting(4, least=1)
    width: int = _setting(128, least=1)
    heads: int = _setting(4, least=1)
    dropout: float = _setting(0.0, least=0, below=1)
    vocab: int = _setting(256, least=256)


@dataclass(frozen=True)
class DataConfig:
    """[data]: `corpus` is "stdlib", a folder of text, or a text file. Batch sizes count samples of `seq_len` tokens."""

    corpus: str = "stdlib"
    seq_len: int = _setting(128, least=1)
    micro_batch_size: int = _setting(16, least=1)
    global_batch_size: int = _setting(16, least=1)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches whose gradients are added up in one step."""
        return self.global_batch_size // self.micro_batch_size


@dataclass(frozen=True)
class OptimizerConfig:
    """[optimizer]: as torch.optim's AdamW or SGD. `betas` belong to adamw, `momentum` to sgd; clip_norm bounds the gradient's norm."""

    kind: Literal["adamw", "sgd"] = "adamw"
    lr: float = _setting(1e-3, least=0)
    weight_decay: float = _setting(0.1, least=0)
    betas: tuple[float, float] = _setting((0.9, 0.95), least=0, below=1)
    momentum: float = _setting(0.0, least=0)
    fused: bool = True
    clip_norm: float | None = _setting(1.0, least=0)


@dataclass(frozen=True)
class ScheduleConfig:
    """[schedule]: learning rate over the steps: linear warm-up to optimizer.lr, then a cosine down to min_lr at the last step.

    Without a min_lr it is a tenth of optimizer.lr.
    """

    kind: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = _setting(50, least=0)
    min_lr: float | None = _setting(None, least=0)


@dataclass(frozen=True)
class MemoryConfig:
    """[memory]: how saved values are dropped, and the most bytes a step may need ("2GiB", "40%", "minimum" or a number)."""

    recompute: Recompute = "auto"
    budget: int | str | None = None


@dataclass(frozen=True)
class Config:
    """Everything that a run depends on."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    memory: MemoryConfig = MemoryConfig()

    def __post_init__(self) -> None:
        """Raises ConfigError for values that are right by themselves and wrong together."""
        if self.data.global_batch_size % self.data.micro_batch_size:
            raise ConfigError(
                f"data.global_batch_size = {self.data.global_batch_size} is not a multiple of data.micro_batch_size = "
                f"{self.data.micro_batch_size}; a step adds up whole micro-batches, so make it one"
            )
        if self.model.width % self.model.heads:
            raise ConfigError(
                f"model.width = {self.model.width} is not a multiple of model.heads = {self.model.heads}; "
                "every head gets the same number of channels, so make it one"
            )
        if self.schedule.min_lr is not None and self.schedule.min_lr > self.optimizer.lr:
            raise ConfigError(
                f"schedule.min_lr = {self.schedule.min_lr} is above optimizer.lr = {self.optimizer.lr}; "
                "the learning rate falls from the second to the first, so lower min_lr"
            )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Section -> key -> value, every key of every section, in the order of this file."""
        return asdict(self)
