"""What a finished run shows: validation loss, beside the counting models where tokens are bytes, the curve, the ledger."""

import numpy as np

from packhorse.data import Corpus, counting_nats, validation_starts
from packhorse.train.config import Config
from packhorse.train.console import Console
from packhorse.train.metrics import MetricsFile, Record, read_metrics
from packhorse.train.plot import plot_losses
from packhorse.train.task import objective_of

ORDERS = (1, 2, 3)


def counting_on_validation(config: Config, corpus: Corpus) -> dict[int, float]:
    """Order -> nats/byte of the counting model on exactly the bytes that the validation loss is a mean of; empty where tokens are not bytes, or
    where hidden ones are predicted from both sides, which a counting model does not do."""
    if corpus.unit != "byte" or objective_of(config.model) == "masked":
        return {}
    num_samples = config.run.eval_batches * config.data.micro_batch_size
    starts = validation_starts(corpus.validation, num_samples, config.data.seq_len)
    train, validation = corpus.train.view(np.uint8), corpus.validation.view(np.uint8)
    predicted = starts[:, None] + np.arange(1, config.data.seq_len + 1)
    return {order: float(counting_nats(train, validation, order)[predicted].mean()) for order in ORDERS}


def print_report(config: Config, corpus: Corpus, validation_loss: float, ledger: object, metrics: MetricsFile, console: Console) -> None:
    """Prints the end of a run and appends its record. `ledger` is printed as it is; None if no step was run."""
    counting = counting_on_validation(config, corpus)
    console.say(plot_losses(read_metrics(metrics.path), console.width, corpus.unit))
    if ledger is not None:
        console.say(str(ledger))
    record: Record = {"kind": "end", "step": config.run.steps, "loss": validation_loss}
    beside = ""
    if counting:
        record["counting_nats"] = {str(order): nats for order, nats in counting.items()}
        beside = "\ncounting models on the same bytes: " + ", ".join(f"order {order}: {nats:.2f}" for order, nats in counting.items())
    metrics.append(record)
    console.say(f"validation loss {validation_loss:.4f} nats/{corpus.unit}{beside}")
