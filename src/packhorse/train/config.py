"""The settings of a run: what a configuration file may say, and what each key means. No torch."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from packhorse.errors import ConfigError
from packhorse.mesh import Mesh
from packhorse.models.sizes import find_size

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
    keep_every: int = _setting(0, least=0)  # checkpoints of these steps are never deleted
    trial_save: bool = True  # before the first step the state is saved once and read back, so that a full disk is known at once
    tensorboard: bool = False  # event files in RUN/tensorboard
    wandb: bool = False  # a Weights & Biases run, in the mode that its own settings say
    resume: str = "none"  # "auto", "none", or the path of a checkpoint
    threads: int | None = _setting(None, least=1)  # of torch on the CPU; the bits of a sum depend on it. Without it torch's own choice
    peak_flops: float | None = _setting(None, least=1)  # of the device, a second; without it there is no MFU


# model.kind -> the keys that mean something for it, beside objective, and their defaults
_MODEL_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 4, "width": 128, "heads": 4, "dropout": 0.0, "vocab": 256},
    "bert": {"layers": 4, "width": 128, "heads": 4, "dropout": 0.1, "vocab": 257},  # one more than bytes: the token that hides others
    "lstm": {"layers": 2, "width": 128, "dropout": 0.0, "vocab": 256},
    "hf": {"config": None, "weights": None},
}
_OBJECTIVES = {"gpt": ("auto", "causal"), "bert": ("auto", "masked"), "lstm": ("auto", "causal"), "hf": ("auto", "causal", "masked")}


@dataclass(frozen=True)
class ModelConfig:
    """[model]: what is trained.

    "gpt", "bert", "lstm": the models of packhorse.models over `vocab` tokens, `width` channels, `layers` blocks, `heads` heads; `size` names a
    published GPT or BERT instead ("gpt2-xl") and sets layers, width and heads, and vocab unless that is given.
    "hf": an unmodified Hugging Face model. `config` is its config.json or the folder that holds it; `weights` a safetensors file, or the folder of
    them, to start from (without it weights are drawn). Its dropout and all else are as that file says.
    `objective`: "causal" predicts the next token, "masked" hidden ones; "auto" is what the model is made for.

    A key that is not given gets the default of its kind (or stays None where the kind has no use for it).
    """

    kind: Literal["gpt", "bert", "lstm", "hf"] = "gpt"
    size: str | None = None
    layers: int | None = _setting(None, least=1)
    width: int | None = _setting(None, least=1)
    heads: int | None = _setting(None, least=1)
    dropout: float | None = _setting(None, least=0, below=1)
    vocab: int | None = _setting(None, least=2)
    config: str | None = None
    weights: str | None = None
    objective: Literal["auto", "causal", "masked"] = "auto"

    def __post_init__(self) -> None:
        """Fills in what follows from `kind` and `size`. Raises ConfigError for a key that the kind has no use for, or that contradicts the size."""
        defaults = dict(_MODEL_DEFAULTS[self.kind])
        for key in ("layers", "width", "heads", "dropout", "vocab", "config", "weights"):
            if getattr(self, key) is not None and key not in defaults:
                raise ConfigError(f"model.{key} means nothing for model.kind = {self.kind!r}, which has {', '.join(defaults)}; leave it out")
        if self.objective not in _OBJECTIVES[self.kind]:
            raise ConfigError(
                f"model.objective = {self.objective!r} does not go with model.kind = {self.kind!r}, expected {' or '.join(_OBJECTIVES[self.kind])}"
            )
        if self.kind == "hf" and self.config is None:
            raise ConfigError("model.kind = 'hf' needs model.config: the config.json of a Hugging Face model, or the folder that holds it")
        if self.size is not None:
            size = find_size(self.kind, self.size)
            for key in ("layers", "width", "heads"):
                if getattr(self, key) not in (None, getattr(size, key)):
                    raise ConfigError(
                        f"model.size = {self.size!r} has {key} {getattr(size, key)}, and model.{key} is {getattr(self, key)}; leave one of them out"
                    )
            defaults |= {key: getattr(size, key) for key in ("layers", "width", "heads", "vocab")}
        for key, default in defaults.items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, default)  # the class is frozen for everybody else
        if self.width is not None and self.heads is not None and self.width % self.heads:
            raise ConfigError(
                f"model.width = {self.width} is not a multiple of model.heads = {self.heads}; "
                "every head gets the same number of channels, so make it one"
            )


@dataclass(frozen=True)
class DataConfig:
    """[data]: `corpus` is "stdlib", a folder of text and JSONL, a text or JSONL file, or token numbers of dtype `token_dtype`: a file (.bin), or a
    folder with train.bin and val.bin.

    tokenizer: "bytes", or a Hugging Face tokenizer.json (or the folder that holds one). field: the key of the text in a line of JSONL.
    order: "random" draws windows with replacement; "epochs" takes each window once an epoch, in an order that is a function of (seed, epoch).
    Documents are packed one after the other, an end-of-text token between them. Batch sizes count samples of `seq_len` tokens: a step of
    global_batch_size is shared by the dp ranks, each of which adds up the gradients of micro-batches of micro_batch_size.
    """

    corpus: str = "stdlib"
    tokenizer: str = "bytes"
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    field: str = "text"
    order: Literal["random", "epochs"] = "random"
    seq_len: int = _setting(128, least=1)
    micro_batch_size: int = _setting(16, least=1)
    global_batch_size: int = _setting(16, least=1)


@dataclass(frozen=True)
class PrecisionConfig:
    """[precision]: `compute` "fp32" keeps the model's own dtype; "bf16" and "fp16" compute in 16 bits with fp32 master weights.

    gradients: dtype in which gradients are kept and added up; "same" as the parameters that are computed with. loss_scale: the first loss scale
    of fp16, halved at an overflow and doubled after growth_interval steps without one.
    """

    compute: Literal["fp32", "bf16", "fp16"] = "fp32"
    gradients: Literal["same", "fp32", "bf16", "fp16"] = "same"
    loss_scale: float = _setting(65536.0, least=1)
    growth_interval: int = _setting(2000, least=1)

    def __post_init__(self) -> None:
        """Raises ConfigError for a loss scale that would round what it scales."""
        if math.frexp(self.loss_scale)[0] != 0.5:
            raise ConfigError(
                f"precision.loss_scale = {self.loss_scale} is not a power of two such as 65536.0, so it would round gradients; make it one"
            )


# optimizer.kind -> the keys that mean something for it, beside lr and clip_norm, and their defaults
_ADAM_BETAS = (0.9, 0.95)
_OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "adadelta": {"weight_decay": 0.0},
    "adagrad": {"weight_decay": 0.0, "fused": True},
    "adam": {"weight_decay": 0.0, "betas": _ADAM_BETAS, "fused": True},
    "adamax": {"weight_decay": 0.0, "betas": _ADAM_BETAS},
    "adamw": {"weight_decay": 0.1, "betas": _ADAM_BETAS, "fused": True},
    "asgd": {"weight_decay": 0.0},
    "nadam": {"weight_decay": 0.0, "betas": _ADAM_BETAS},
    "radam": {"weight_decay": 0.0, "betas": _ADAM_BETAS},
    "rmsprop": {"weight_decay": 0.0, "momentum": 0.0},
    "rprop": {},
    "sgd": {"weight_decay": 0.1, "momentum": 0.0, "fused": True},
}


@dataclass(frozen=True)
class OptimizerConfig:
    """[optimizer]: a class of torch.optim by its lower-case name; `options` are the rest of its keyword arguments.

    clip_norm bounds the norm of the gradient.

    A key that is not given gets the default of its kind (or stays None where the kind has no use for it).
    """

    kind: Literal["adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd"] = "adamw"
    lr: float = _setting(1e-3, least=0)
    weight_decay: float | None = _setting(None, least=0)
    betas: tuple[float, float] | None = _setting(None, least=0, below=1)
    momentum: float | None = _setting(None, least=0)
    fused: bool | None = None
    clip_norm: float | None = _setting(1.0, least=0)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Fills in what follows from `kind`. Raises ConfigError for a key that the kind has no use for."""
        defaults = _OPTIMIZER_DEFAULTS[self.kind]
        for key in ("weight_decay", "betas", "momentum", "fused"):
            if getattr(self, key) is not None and key not in defaults:
                known = ", ".join(["lr", *defaults, "options"])
                raise ConfigError(f"optimizer.{key} means nothing for optimizer.kind = {self.kind!r}, which has {known}; leave it out")
            if getattr(self, key) is None and key in defaults:
                object.__setattr__(self, key, defaults[key])  # the class is frozen for everybody else


@dataclass(frozen=True)
class ScheduleConfig:
    """[schedule]: learning rate over the steps.

    "cosine", "linear": a linear warm-up of warmup_steps to optimizer.lr (50 if not given), then down to min_lr at the last step (a tenth of
    optimizer.lr if not given). "constant": the warm-up, then optimizer.lr.
    "torch": the class `name` of torch.optim.lr_scheduler with the keyword arguments `options`. A resumed run goes on with the scheduler as saved.
    """

    kind: Literal["cosine", "linear", "constant", "torch"] = "cosine"
    warmup_steps: int | None = _setting(None, least=0)
    min_lr: float | None = _setting(None, least=0)
    name: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ConfigError for a key that the kind has no use for, and for a torch scheduler without a name."""
        used = {"torch": ("name", "options"), "constant": ("warmup_steps",)}.get(self.kind, ("warmup_steps", "min_lr"))
        for key in ("warmup_steps", "min_lr", "name", "options"):
            if key not in used and getattr(self, key) not in (None, {}):
                advice = 'set schedule.kind = "torch", or leave it out' if key in ("name", "options") else "leave it out"
                raise ConfigError(f"schedule.{key} means nothing for schedule.kind = {self.kind!r}, which has {', '.join(used)}; {advice}")
        if self.kind == "torch" and self.name is None:
            raise ConfigError('schedule.kind = "torch" needs schedule.name, the name of a class of torch.optim.lr_scheduler such as "ExponentialLR"')
        if self.warmup_steps is None and "warmup_steps" in used:
            object.__setattr__(self, "warmup_steps", 50)  # the class is frozen for everybody else


@dataclass(frozen=True)
class MemoryConfig:
    """[memory]: how saved values are dropped, and the most bytes a step may need ("2GiB", "40%", "minimum" or a number).

    residency: where saved values wait for the backward pass. "keep": in place. "shard": what all tp ranks have alike is cut into slices over them.
    "offload": on the host, as slices where that can be. "auto": whatever meets the budget and is fastest. optimizer_residency: the same of optimizer
    states and master weights, which the host then updates. host_budget: of the host's memory for that ("8GiB", a number, or "30%" of the saved
    values); without it nothing goes there (docs/residency.md).
    """

    recompute: Recompute = "auto"
    budget: int | str | None = None
    residency: Literal["auto", "keep", "shard", "offload"] = "auto"
    optimizer_residency: Literal["auto", "keep", "offload"] = "auto"
    host_budget: int | str | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for the host without memory there."""
        if self.optimizer_residency == "offload" and self.host_budget is None:
            raise ConfigError(
                'memory.optimizer_residency = "offload" keeps optimizer states on the host and needs memory.host_budget, the memory there: bytes, or '
                '"8GiB"'
            )
        if self.residency == "offload" and self.host_budget is None:
            raise ConfigError(
                'memory.residency = "offload" copies saved values to the host and needs memory.host_budget, the memory there: bytes, "8GiB", or a '
                'share of the saved values such as "50%"'
            )


@dataclass(frozen=True)
class MeshConfig:
    """[mesh]: over how many ranks a step is spread: dp times tp. tp neighbours share each matrix of the model and work on the same samples; dp such
    groups take a part of the batch each. Without dp as many groups as the launcher has started.

    zero_stage: what is sharded over dp. 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too.
    sequence_parallel: between the matrices each of the tp ranks has a part of the sequence.
    [mesh.tensor_plan] says how modules are cut where the model's own plan does not: "layers.*.mlp.up_proj" = "column" (docs/tensor.md).
    """

    dp: int | None = _setting(None, least=1)
    tp: int = _setting(1, least=1)
    zero_stage: Literal[0, 1, 2, 3] = 0
    sequence_parallel: bool = False
    tensor_plan: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ConfigError for a sequence that would be shared by one rank."""
        if self.sequence_parallel and self.tp == 1:
            raise ConfigError("mesh.sequence_parallel = true, and mesh.tp = 1: the sequence is shared by the tp ranks; set mesh.tp to 2 or more")


@dataclass(frozen=True)
class Config:
    """Everything that a run depends on."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    memory: MemoryConfig = MemoryConfig()
    mesh: MeshConfig = MeshConfig()

    def __post_init__(self) -> None:
        """Raises ConfigError for values that are right by themselves and wrong together."""
        data, dp = self.data, self.ranks.dp
        if data.global_batch_size % (data.micro_batch_size * dp):
            unit = "ranks" if self.mesh.tp == 1 else "groups of ranks"
            times, all_ranks = (f" times {dp} {unit} (mesh.dp)", " on every rank") if dp > 1 else ("", "")
            raise ConfigError(
                f"data.global_batch_size = {data.global_batch_size} is not a multiple of data.micro_batch_size = {data.micro_batch_size}{times}; "
                f"a step adds up whole micro-batches{all_ranks}, so make it one"
            )
        if self.mesh.sequence_parallel and data.seq_len % self.mesh.tp:
            raise ConfigError(
                f"data.seq_len = {data.seq_len} is not a multiple of mesh.tp = {self.mesh.tp}; with mesh.sequence_parallel each of these ranks "
                "has an equal part of the sequence, so make it one"
            )
        if self.memory.residency == "shard" and self.mesh.tp == 1:
            raise ConfigError(
                'memory.residency = "shard", and mesh.tp = 1: what is cut is shared by the tp ranks; set mesh.tp to 2 or more, or memory.residency '
                'to "offload"'
            )
        if self.schedule.min_lr is not None and self.schedule.min_lr > self.optimizer.lr:
            raise ConfigError(
                f"schedule.min_lr = {self.schedule.min_lr} is above optimizer.lr = {self.optimizer.lr}; "
                "the learning rate falls from the second to the first, so lower min_lr"
            )

    @property
    def ranks(self) -> Mesh:
        """The ranks of [mesh]; of one tp group where dp is not known yet."""
        return Mesh(self.mesh.dp or 1, self.mesh.tp)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches whose gradients a rank adds up in one step."""
        return self.data.global_batch_size // (self.data.micro_batch_size * self.ranks.dp)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Section -> key -> value, every key of every section, in the order of this file."""
        return asdict(self)
