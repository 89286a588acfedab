"""Config -> a planned, compiled and, where asked, resumed run; trains it and reports."""

from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn

from packhorse.data import Corpus, load_corpus, needs_tokenizing
from packhorse.mesh import Mesh
from packhorse.runtime.ranks import Ranks
from packhorse.runtime.together import first_ahead, from_first, together
from packhorse.train.build import (
    build_for_ranks,
    build_model,
    build_optimizer,
    build_plan,
    build_step,
    model_vocab,
    seed_of_rank,
    training_batch,
    validation_batches,
)
from packhorse.train.config import Config
from packhorse.train.config_file import format_config
from packhorse.train.console import Console
from packhorse.train.engine import Engine
from packhorse.train.fits import fit_line, free_bytes, require_fit
from packhorse.train.launched import Launched, launched, spread
from packhorse.train.meter import Meter
from packhorse.train.metrics import MetricsFile
from packhorse.train.optimizer import make_scheduler
from packhorse.train.report import print_report
from packhorse.train.run_folder import RunFolder
from packhorse.train.sinks import open_sinks, require_sinks
from packhorse.train.stop import StopSignal
from packhorse.train.trainer import Trainer

_BEFORE_TRAINING = timedelta(days=2)  # that ranks wait for rank 0, which may tokenize a large corpus


def train(config: Config, *, engine: Engine, console: Console, dry_run: bool = False, trace_nan: bool = False) -> int:
    """Runs `config` to its end and returns the exit code: 0, or 128 + the signal that stopped it at a step boundary.

    `engine` is the package packhorse. With `dry_run` everything is planned and printed, and nothing is trained or written.
    With `trace_nan` a loss that is not finite is traced to the module where it begins.
    Under a launcher every rank of the job calls it; rank 0 alone writes and speaks, and an error of one of them is raised on all.
    Raises UserError as data, planning, steps and checkpoints do; what was saved stays.
    """
    here = launched()
    config = spread(config, here)
    if here.rank:
        console = Console.silent()
    ranks = None if here.num_ranks == 1 or dry_run else _joined(config, here)
    if dry_run and here.rank:
        return 0
    folder = RunFolder(Path(config.run.dir).expanduser())
    checkpoint = folder.start(config.run.resume, console.say, ranks)
    from_first(ranks, lambda: require_sinks(config))
    console.say(format_config(config))
    corpus = first_ahead(ranks, lambda: _load_data(config, folder, console, here.rank, dry_run=dry_run))
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    model = together(ranks, lambda: build_model(config, "meta" if dry_run else "cpu") if ranks is None else build_for_ranks(config))
    optimizer = build_optimizer(config, model)
    scheduler = make_scheduler(config.schedule, optimizer)
    plan = together(ranks, lambda: build_plan(config, engine, model, optimizer, here.rank))
    console.say(str(plan))
    if dry_run or corpus is None:
        console.say(fit_line(plan.peak_bytes, free_bytes(), here.local_num_ranks))
        console.record({"kind": "plan", "step": 0, "plan": plan.to_dict()})
        console.say(f"dry run: nothing was trained or written; the run would start {f'from {checkpoint}' if checkpoint else 'at step 1'}")
        return 0
    _require_fit(plan.peak_bytes, model, here, ranks)
    if dp_rank := config.ranks.dp_rank(here.rank):
        torch.manual_seed(seed_of_rank(config.run.seed, dp_rank))
    with ExitStack() as stack:
        from_first(ranks, lambda: stack.enter_context(folder.locked()))
        step = build_step(config, engine, model, plan, scheduler)
        step_tokens = config.data.global_batch_size * config.data.seq_len
        meter = Meter(step_tokens=step_tokens, step_flops=plan.flops, peak_flops=config.run.peak_flops)
        trainer = Trainer(config, corpus=corpus, folder=folder, step=step, optimizer=optimizer, meter=meter, console=console, trace_nan=trace_nan)
        if checkpoint is not None:
            trainer.resume(str(checkpoint))
        elif config.run.trial_save:
            trainer.trial_save()
        if trainer.steps_done < config.run.steps:  # otherwise the folder keeps the settings that it was trained with
            from_first(ranks, lambda: folder.write_config(config, console.say))
        from_first(ranks, lambda: folder.set_aside_beyond(trainer.steps_done, console.say))
        metrics = None
        if not here.rank:
            sinks = stack.enter_context(open_sinks(config, folder, trainer.steps_done, console.say))
            metrics = stack.enter_context(MetricsFile(folder.metrics, trainer.steps_done, (console.record, sinks)))
        stop = stack.enter_context(StopSignal(says=not here.rank))
        trainer.run(metrics, stop)
        loss = None if trainer.asked_to_stop(stop) else trainer.evaluate(metrics, stop)
        if loss is None:
            name = stop.received.name if stop.received else "stopped"
            console.say(f"{name}: step {trainer.steps_done} is saved; the same command with --resume auto continues from there")
        elif metrics is not None:
            print_report(config, corpus, loss, step.ledger() if trainer.steps_here else None, metrics, console)
        return stop.exit_code


def _joined(config: Config, here: Launched) -> Ranks:
    """The ranks of the job, for what comes before the first step. Raises UserError if they were given other settings than rank 0."""
    ranks = Ranks(Mesh(dp=here.num_ranks), here.rank, torch.device("cpu"), _BEFORE_TRAINING, "start")
    ranks.require_same({f"{section}.{key}": value for section, values in config.to_dict().items() for key, value in values.items()})
    return ranks


def _require_fit(peak_bytes: int, model: nn.Module, here: Launched, ranks: Ranks | None) -> None:
    """Raises UserError if the steps of all ranks on this machine need more memory than it has free."""
    own = torch.tensor([peak_bytes, sum(t.nbytes for t in [*model.parameters(), *model.buffers()] if t.device.type != "meta")])
    every = own.view(1, 2) if ranks is None else ranks.all_gather(own, "bytes")
    peaks, held = every[list(here.neighbours)].sum(0).tolist()
    together(ranks, lambda: require_fit(peaks, held, free_bytes(), here.local_num_ranks))


def _load_data(config: Config, folder: RunFolder, console: Console, rank: int, *, dry_run: bool) -> Corpus | None:
    """The corpus of [data]; None in a dry run that would have to tokenize it. What is wrong with it is said before the time that planning takes."""
    data, vocab, tokens = config.data, model_vocab(config), folder.root / "tokens"
    if dry_run and needs_tokenizing(data.corpus, tokenizer=data.tokenizer, field=data.field, vocab=vocab, folder=tokens):
        console.say(f"data: text that the run would first tokenize into {tokens}\n")
        return None
    corpus = load_corpus(
        data.corpus, tokenizer=data.tokenizer, token_dtype=data.token_dtype, field=data.field, vocab=vocab, folder=tokens, report=console
    )
    console.say(f"data: {corpus.describe()}\n")
    training_batch(config, corpus, 0, rank)
    validation_batches(config, corpus, rank)
    return corpus
