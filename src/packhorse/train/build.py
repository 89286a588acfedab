"""Config -> the model, the optimizer, the batches and the plan of a run.

B micro_batch_size, T seq_len.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from packhorse.data import Corpus, training_samples, validation_samples
from packhorse.errors import ConfigError
from packhorse.models.bert import bert
from packhorse.models.gpt import gpt
from packhorse.models.lstm import LSTM
from packhorse.models.sizes import Size, find_size
from packhorse.runtime.deferred import NeedsValues, deferred
from packhorse.train.config import Config
from packhorse.train.engine import Batch, Engine, Plan, Step
from packhorse.train.optimizer import make_optimizer
from packhorse.train.task import named, objective_of, posed, source_of, vocab_of

GRADIENT_DTYPES = {"same": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_model(config: Config, device: str = "cpu") -> nn.Module:
    """The model of [model], its weights drawn from torch's ordinary generator seeded with run.seed, or read from model.weights.

    On "meta" it has shapes but no memory, and no weights are read.
    Raises ConfigError if it cannot be trained on text as [model] and [data] say, CheckpointError if model.weights do not fit.
    """
    options, seq_len = config.model, config.data.seq_len
    if options.kind == "hf":
        return _build_hugging_face(config, device)
    torch.manual_seed(config.run.seed)
    assert options.layers is not None and options.width is not None and options.dropout is not None and options.vocab is not None
    with torch.device(device):
        if options.kind == "lstm":
            return LSTM(vocab=options.vocab, layers=options.layers, width=options.width, dropout=options.dropout)
        assert options.heads is not None
        size = Size(options.layers, options.width, options.heads, options.vocab, seq_len)
        if options.kind == "bert":
            pre_norm = options.size is not None and find_size("bert", options.size).pre_norm
            return bert(replace(size, pre_norm=pre_norm), dropout=options.dropout)
        return gpt(size, dropout=options.dropout)


def build_for_ranks(config: Config) -> nn.Module:
    """As `build_model`, for one of several ranks: without memory where that can be, its values are made when it is compiled and no rank holds all of
    them. Weights that are read from a file, and models whose construction looks at values, are built as usual."""
    if config.model.weights is not None:
        return build_model(config)
    try:
        return deferred(lambda: build_model(config))
    except NeedsValues:
        return build_model(config)


def _build_hugging_face(config: Config, device: str) -> nn.Module:
    from packhorse.models import hf  # imports the library transformers, which takes seconds

    options, source = config.model, source_of(config.model)
    objective = objective_of(options)
    torch.manual_seed(config.run.seed)
    if options.weights is not None and device != "meta":
        model = hf.load(source, Path(options.weights).expanduser())
    else:
        with torch.device(device):
            model = hf.build(source)
    if objective == "causal" and hf.ignores_shifted_labels(model):
        raise ConfigError(
            f"{source.path}: the loss of {source.model_class.__name__} takes no targets that are shifted already (shift_labels), so what it would "
            "predict is not known to be the next token; choose another model, or train it from Python with a loss of your own (packhorse.plan, loss=)"
        )
    places = hf.max_seq_len(source, model)
    if places is not None and config.data.seq_len > places:
        raise ConfigError(
            f"data.seq_len = {config.data.seq_len}, and the model of {source.path} has {places} positions; lower data.seq_len to at most that"
        )
    return model


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """The torch optimizer of [optimizer]. Matrices decay; biases and norm scales, which have one dim, do not. Raises as `make_optimizer`."""
    parameters, decay = list(model.parameters()), config.optimizer.weight_decay
    groups: list[dict] = [{"params": [p for p in parameters if p.dim() >= 2]}, {"params": [p for p in parameters if p.dim() < 2]}]
    if decay is not None:
        groups = [{**group, "weight_decay": rate} for group, rate in zip(groups, (decay, 0.0), strict=True)]
    return make_optimizer(config.optimizer, groups)


def build_plan(config: Config, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0) -> Plan:
    """The plan of one step, as `rank` runs it. Only the shapes of the batch count, so no data is read. Raises what `plan` raises."""
    ids = torch.zeros(config.data.micro_batch_size, config.data.seq_len, dtype=torch.int64)
    micro_batches = [named(config.model, ids, ids.clone()) for _ in range(config.num_micro_batches)]
    return engine.plan(
        model,
        _as_batch(micro_batches),
        optimizer=optimizer,
        clip_norm=config.optimizer.clip_norm,
        num_micro_batches=config.num_micro_batches,
        precision=config.precision.compute,
        grad_dtype=GRADIENT_DTYPES[config.precision.gradients],
        recompute=config.memory.recompute,
        budget=config.memory.budget,
        residency=config.memory.residency,
        optimizer_residency=config.memory.optimizer_residency,
        host_budget=config.memory.host_budget,
        mesh=config.ranks,
        rank=rank,
        zero_stage=config.mesh.zero_stage,
        tensor_plan=config.mesh.tensor_plan or None,
        sequence_parallel=config.mesh.sequence_parallel,
    )


def build_step(config: Config, engine: Engine, model: nn.Module, plan: Plan, scheduler: Any) -> Step:
    """The compiled step, with the loss scale of [precision] where it has one."""
    step = engine.compile(model, plan, scheduler)
    if step.loss_scale is not None:
        step.loss_scale.value, step.loss_scale.growth_interval = config.precision.loss_scale, config.precision.growth_interval
    return step


def seed_of_rank(seed: int, dp_rank: int) -> int:
    """What torch's generator starts from on a dp rank above 0 once the model is drawn, so that each has dropout of its own. The tp ranks of one group
    draw the same numbers, since they work on the same samples; what is drawn otherwise on each of them, the plan knows."""
    digest = hashlib.sha256(f"seed {seed} rank {dp_rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def model_vocab(config: Config) -> int | None:
    """How many tokens the model of [model] knows; None where its config.json does not say. Builds no model."""
    return vocab_of(config.model)


def training_batch(config: Config, corpus: Corpus, step: int, rank: int = 0) -> Batch:
    """What a rank trains on at step number `step`, from 0: ids and labels (B, T) of each micro-batch. A function of the seed, the step and the rank.

    The samples of a step are dealt out to the dp ranks a micro-batch at a time: micro-batch m of dp rank r is number m dp + r of the step. So the
    micro-batches of a step are the same ones for any number of ranks, and those that run at the same time are neighbours. The tp ranks of a group
    have the same.
    Raises DataError as `training_samples`.
    """
    data, mesh = config.data, config.ranks
    micro_batches = []
    for micro_batch in range(config.num_micro_batches):
        first = step * data.global_batch_size + (micro_batch * mesh.dp + mesh.dp_rank(rank)) * data.micro_batch_size
        ids, labels = training_samples(
            corpus,
            order=data.order,
            seed=config.run.seed,
            first=first,
            count=data.micro_batch_size,
            global_batch_size=data.global_batch_size,
            seq_len=data.seq_len,
        )
        micro_batches.append(posed(config, corpus, ids, labels, first=first))
    return _as_batch(micro_batches)


def validation_batches(config: Config, corpus: Corpus, rank: int = 0) -> list[tuple[dict[str, Tensor], int]]:
    """A rank's part of run.eval_batches batches of ids and labels (B, T), spread evenly over the validation text; the same at every evaluation.

    Each with its weight: of how many batches it stands for, the mean over ranks of their losses is the mean. That is dp where each dp rank has
    another one, and 1 for those that are left over, which every rank evaluates, so that all have as many.
    Raises DataError as `validation_samples`.
    """
    data = config.data
    ids, labels = validation_samples(corpus, config.run.eval_batches * data.micro_batch_size, data.seq_len)
    whole = posed(config, corpus, ids, labels, first=0, validation=True)
    parts = zip(*(tensor.split(data.micro_batch_size) for tensor in whole.values()), strict=True)
    batches = [dict(zip(whole, (part.contiguous() for part in some), strict=True)) for some in parts]
    mesh = config.ranks
    dp = mesh.dp
    dealt = len(batches) // dp * dp
    return [(batch, dp) for batch in batches[mesh.dp_rank(rank) : dealt : dp]] + [(batch, 1) for batch in batches[dealt:]]


def _as_batch(micro_batches: list[dict[str, Tensor]]) -> Batch:
    return micro_batches if len(micro_batches) > 1 else micro_batches[0]
