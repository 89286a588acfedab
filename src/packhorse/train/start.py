"""Config -> a planned, compiled and, where asked, resumed run; trains it and reports."""

from pathlib import Path

import torch

from packhorse.data import Corpus, load_corpus, needs_tokenizing
from packhorse.train.build import build_model, build_optimizer, build_plan, build_step, model_vocab, training_batch, validation_batches
from packhorse.train.config import Config
from packhorse.train.config_file import format_config
from packhorse.train.console import Console
from packhorse.train.engine import Engine
from packhorse.train.fits import fit_line, free_bytes, require_fit
from packhorse.train.meter import Meter
from packhorse.train.metrics import MetricsFile
from packhorse.train.optimizer import make_scheduler
from packhorse.train.report import print_report
from packhorse.train.run_folder import RunFolder
from packhorse.train.sinks import open_sinks, require_sinks
from packhorse.train.stop import StopSignal
from packhorse.train.trainer import Trainer


def train(config: Config, *, engine: Engine, console: Console, dry_run: bool = False, trace_nan: bool = False) -> int:
    """Runs `config` to its end and returns the exit code: 0, or 128 + the signal that stopped it at a step boundary.

    `engine` is the package packhorse. With `dry_run` everything is planned and printed, and nothing is trained or written.
    With `trace_nan` a loss that is not finite is traced to the module where it begins.
    Raises UserError as data, planning, steps and checkpoints do; what was saved stays.
    """
    folder = RunFolder(Path(config.run.dir).expanduser())
    checkpoint = folder.start(config.run.resume, console.say)
    require_sinks(config)
    console.say(format_config(config))
    corpus = _load_data(config, folder, console, dry_run=dry_run)
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    model = build_model(config, "meta" if dry_run else "cpu")
    optimizer = build_optimizer(config, model)
    scheduler = make_scheduler(config.schedule, optimizer)
    plan = build_plan(config, engine, model, optimizer)
    console.say(str(plan))
    if dry_run or corpus is None:
        console.say(fit_line(plan.peak_bytes, free_bytes()))
        console.record({"kind": "plan", "step": 0, "plan": plan.to_dict()})
        console.say(f"dry run: nothing was trained or written; the run would start {f'from {checkpoint}' if checkpoint else 'at step 1'}")
        return 0
    require_fit(plan.peak_bytes, sum(t.nbytes for t in [*model.parameters(), *model.buffers()]), free_bytes())
    with folder.locked():
        step = build_step(config, engine, model, plan, scheduler)
        step_tokens = config.data.global_batch_size * config.data.seq_len
        meter = Meter(step_tokens=step_tokens, step_flops=plan.flops, peak_flops=config.run.peak_flops)
        trainer = Trainer(config, corpus=corpus, folder=folder, step=step, optimizer=optimizer, meter=meter, console=console, trace_nan=trace_nan)
        if checkpoint is not None:
            trainer.resume(str(checkpoint))
        elif config.run.trial_save:
            trainer.trial_save()
        if trainer.steps_done < config.run.steps:  # otherwise the folder keeps the settings that it was trained with
            folder.write_config(config, console.say)
        folder.set_aside_beyond(trainer.steps_done, console.say)
        with (
            open_sinks(config, folder, trainer.steps_done, console.say) as sinks,
            MetricsFile(folder.metrics, trainer.steps_done, (console.record, sinks)) as metrics,
            StopSignal() as stop,
        ):
            trainer.run(metrics, stop)
            loss = None if stop.received else trainer.evaluate(metrics, stop)
            if loss is None:
                name = stop.received.name if stop.received else "stopped"
                console.say(f"{name}: step {trainer.steps_done} is saved; the same command with --resume auto continues from there")
            else:
                print_report(config, corpus, loss, step.ledger() if trainer.steps_here else None, metrics, console)
            return stop.exit_code


def _load_data(config: Config, folder: RunFolder, console: Console, *, dry_run: bool) -> Corpus | None:
    """The corpus of [data]; None in a dry run that would have to tokenize it. What is wrong with it is said before the time that planning takes."""
    data, vocab, tokens = config.data, model_vocab(config), folder.root / "tokens"
    if dry_run and needs_tokenizing(data.corpus, tokenizer=data.tokenizer, field=data.field, vocab=vocab, folder=tokens):
        console.say(f"data: text that the run would first tokenize into {tokens}\n")
        return None
    corpus = load_corpus(
        data.corpus, tokenizer=data.tokenizer, token_dtype=data.token_dtype, field=data.field, vocab=vocab, folder=tokens, report=console
    )
    console.say(f"data: {corpus.describe()}\n")
    training_batch(config, corpus, 0)
    validation_batches(config, corpus)
    return corpus
