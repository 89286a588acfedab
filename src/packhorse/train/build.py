"""Config -> the model, the optimizer, the batches and the plan of a run.

B micro_batch_size, T seq_len.
"""

import torch
from torch import Tensor, nn

from packhorse.data import Corpus, sample_micro_batch, validation_starts, windows
from packhorse.models.gpt import GPT
from packhorse.train.config import Config
from packhorse.train.engine import Batch, Engine, Plan


def build_model(config: Config, device: str = "cpu") -> nn.Module:
    """The model of [model], its weights drawn from torch's ordinary generator seeded with run.seed. On "meta" it has shapes but no memory."""
    torch.manual_seed(config.run.seed)
    with torch.device(device):
        return GPT(
            vocab=config.model.vocab,
            layers=config.model.layers,
            width=config.model.width,
            heads=config.model.heads,
            seq_len=config.data.seq_len,
            dropout=config.model.dropout,
        )


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """The torch optimizer of [optimizer]. Matrices decay; biases and norm scales, which have one dim, do not."""
    options = config.optimizer
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    # torch refuses to make a fused optimizer over a model on meta, though its step is never called here: the flag is set afterwards
    fused = options.fused and not any(p.is_meta for p in parameters)
    made: torch.optim.Optimizer
    if options.kind == "sgd":
        made = torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, fused=fused)
    else:
        made = torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, fused=fused)
    for group in made.param_groups:
        group["fused"] = options.fused
    return made


def build_plan(config: Config, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer) -> Plan:
    """The plan of one step. Only the shapes of the batch count, so no data is read. Raises what `plan` raises."""
    ids = torch.zeros(config.data.micro_batch_size, config.data.seq_len, dtype=torch.int64)
    micro_batches = [{"ids": ids, "labels": ids.clone()} for _ in range(config.data.num_micro_batches)]
    return engine.plan(
        model,
        _as_batch(micro_batches),
        optimizer=optimizer,
        clip_norm=config.optimizer.clip_norm,
        num_micro_batches=config.data.num_micro_batches,
        recompute=config.memory.recompute,
        budget=config.memory.budget,
    )


def training_batch(config: Config, corpus: Corpus, step: int) -> Batch:
    """What step number `step`, from 0, trains on: ids and labels (B, T) of each micro-batch. A function of the seed and the step."""
    data = config.data
    samples = [
        sample_micro_batch(
            corpus.train,
            seed=config.run.seed,
            step=step,
            micro_batch=micro_batch,
            micro_batch_size=data.micro_batch_size,
            global_batch_size=data.global_batch_size,
            seq_len=data.seq_len,
        )
        for micro_batch in range(data.num_micro_batches)
    ]
    return _as_batch([{"ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)} for ids, labels in samples])


def validation_batches(config: Config, corpus: Corpus) -> list[dict[str, Tensor]]:
    """run.eval_batches batches of ids and labels (B, T), spread evenly over the validation text; the same at every evaluation."""
    data = config.data
    starts = validation_starts(corpus.validation, config.run.eval_batches * data.micro_batch_size, data.seq_len)
    batches = []
    for part in starts.reshape(config.run.eval_batches, data.micro_batch_size):
        ids, labels = windows(corpus.validation, part, data.seq_len)
        batches.append({"ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)})
    return batches


def _as_batch(micro_batches: list[dict[str, Tensor]]) -> Batch:
    return micro_batches if len(micro_batches) > 1 else micro_batches[0]
