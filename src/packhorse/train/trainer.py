"""The loop of a run: steps, log lines, evaluations and checkpoints, until the last step or a signal.

Steps count from 1 in all that is printed or saved: "step 100" is the state after 100 optimizer steps.
"""

import math
import platform
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packhorse.checkpoint import load, prune_checkpoints, save
from packhorse.data import Corpus
from packhorse.errors import CheckpointError, DataError, NonFiniteError
from packhorse.train.build import training_batch, validation_batches
from packhorse.train.config import Config
from packhorse.train.console import Console, eval_fields, step_fields
from packhorse.train.engine import Batch, Ledger, Step
from packhorse.train.meter import Meter
from packhorse.train.metrics import MetricsFile, Record
from packhorse.train.run_folder import RunFolder
from packhorse.train.schedule import learning_rate
from packhorse.train.stop import StopSignal
from packhorse.train.trial import trial_save
from packhorse.units import format_bytes


class Trainer:
    """A run in progress. `steps_done` is its position: data, learning rate and schedule follow from it alone."""

    def __init__(
        self,
        config: Config,
        *,
        corpus: Corpus,
        folder: RunFolder,
        step: Step,
        optimizer: torch.optim.Optimizer,
        meter: Meter,
        console: Console,
        trace_nan: bool = False,
    ) -> None:
        self.config, self.corpus, self.folder, self.step = config, corpus, folder, step
        self._optimizer, self._meter, self._console, self._trace_nan = optimizer, meter, console, trace_nan
        self._validation: list[dict[str, Tensor]] = validation_batches(config, corpus)
        self.steps_done = 0
        self.steps_here = 0  # by this process, since it started or resumed
        self._resumed_from: str | None = None
        self._saved_at: int | None = None
        self._memory_bytes: int | None = None

    def resume(self, checkpoint: str) -> None:
        """Goes to where `checkpoint` was saved. Says so when the data or the machine differ, because bits may then differ too.

        Raises CheckpointError if it is not whole, does not fit, or is not from a run of the trainer.
        """
        extra = load(checkpoint, self.step)
        if not isinstance(extra.get("steps_done"), int):
            raise CheckpointError(f"{checkpoint} does not say after how many steps it was saved; resume from a checkpoint of a run")
        self.steps_done = extra["steps_done"]
        self._resumed_from = checkpoint
        if Path(checkpoint).resolve() == self.folder.checkpoint(self.steps_done).resolve():
            self._saved_at = self.steps_done
        self._console.say(f"resumed from {checkpoint}: step {self.steps_done} of {self.config.run.steps}")
        if self.steps_done >= self.config.run.steps:
            self._console.say("all steps are done already; raise run.steps to train further")
        here = self._circumstances()
        changed = [f"{name} was {extra.get(name)}, is {here[name]}" for name in here if extra.get(name) != here[name]]
        if changed:
            self._console.say(f"the run continues, but not bit for bit: {'; '.join(changed)}")

    def trial_save(self) -> None:
        """Saves before the first step, reads back and removes. Raises CheckpointError if that cannot be done."""
        trial_save(self.folder.checkpoints, self.step, self._extra(), self.config.run, self._console.say)

    def run(self, metrics: MetricsFile, stop: StopSignal) -> None:
        """Trains to the last step, or to the end of the step in which `stop` is asked for, and saves there.

        Raises NonFiniteError at a loss that is not finite, and DataError if the data has become unusable, with the state before that step saved.
        """
        run = self.config.run
        if self.steps_done and not metrics.holds("eval", self.steps_done):  # a signal came during it
            self._evaluate_if_due(metrics, stop)
        while self.steps_done < run.steps and not stop.received:
            metrics.append(self._one_step())
            if self.steps_here == 2 or (self.steps_here == 1 and self.steps_done == run.steps):
                self._print_memory(self.step.ledger())
            self._evaluate_if_due(metrics, stop)
            if _is_due(run.save_every, self.steps_done) or stop.received:
                self.save()
        self.save()

    def evaluate(self, metrics: MetricsFile, stop: StopSignal) -> float | None:
        """Mean loss in nats a byte, or a token, over the validation batches, printed and recorded; None if `stop` is asked for meanwhile."""
        started, losses = time.perf_counter(), []
        for batch in self._validation:
            if stop.received:
                return None
            losses.append(self.step.evaluate(batch))
        loss = sum(losses) / len(losses)
        num_tokens = len(losses) * self.config.data.micro_batch_size * self.config.data.seq_len
        record = {"kind": "eval", "step": self.steps_done, "loss": loss, "num_tokens": num_tokens, "unit": self.corpus.unit}
        metrics.append(record)
        self._console.fields(eval_fields(record, steps=self.config.run.steps))
        self._meter.add_other(time.perf_counter() - started)
        return loss

    def save(self, *, prune: bool = True) -> None:
        """Saves the present state unless this process has done so, reads it back, and deletes those checkpoints that run.keep_last gives up."""
        if self._saved_at == self.steps_done:
            return
        started, path, run = time.perf_counter(), self.folder.checkpoint(self.steps_done), self.config.run
        save(path, self.step, self._extra())
        if prune:
            prune_checkpoints(self.folder.checkpoints, run.keep_last, keep_every=run.keep_every, report=self._console.say)
        # One that was damaged on its way to the disk is set aside by now; the next occasion saves again.
        self._saved_at = self.steps_done if path.exists() else None
        self._meter.add_other(time.perf_counter() - started)

    def _evaluate_if_due(self, metrics: MetricsFile, stop: StopSignal) -> None:
        if _is_due(self.config.run.eval_every, self.steps_done) and self.steps_done < self.config.run.steps:
            self.evaluate(metrics, stop)

    def _one_step(self) -> Record:
        run = self.config.run
        lr = self._set_learning_rate()
        try:
            batch = training_batch(self.config, self.corpus, self.steps_done)
        except DataError:
            self.save()
            raise
        started = time.perf_counter()
        try:
            # the second step is watched from outside too: what kernels use besides the plan is a line of its own in the ledger
            loss = float(self.step(batch, measure_outside=self.steps_here == 1))
        except NonFiniteError as error:
            raise self._not_finite(batch) from error
        step_s = time.perf_counter() - started
        self._meter.add_step(step_s)
        self.steps_done += 1
        self.steps_here += 1
        last = self.step.last
        loss_scale = last.loss_scale
        if last.skipped:
            self._console.say(f"step {self.steps_done} skipped: gradients overflowed at loss scale {loss_scale:.0f}")
        record = {
            "kind": "step",
            "step": self.steps_done,
            "loss": loss,
            "grad_norm": _if_finite(last.grad_norm),
            "clipped_norm": _if_finite(last.clipped_norm),
            "lr": lr,
            "step_s": step_s,
            "tokens_per_s": None,
            "mfu": None,
            "memory_bytes": self._memory_bytes,
        }
        if loss_scale is not None:
            record["loss_scale"] = loss_scale
        if _is_due(run.log_every, self.steps_done) or self.steps_done == run.steps:
            self._log(record)
        return record

    def _set_learning_rate(self) -> float:
        """The learning rate of the coming step: set where it is a function of the step; a torch scheduler has set it already."""
        config, groups = self.config, self._optimizer.param_groups
        if config.schedule.kind == "torch":
            return float(groups[0]["lr"])
        lr = learning_rate(self.steps_done, steps=config.run.steps, peak_lr=config.optimizer.lr, schedule=config.schedule)
        for group in groups:
            group["lr"] = lr
        return lr

    def _log(self, record: Record) -> None:
        """Prints the log line, and completes the record with what it shows: averages since the last one."""
        rate = self._meter.read()
        self._memory_bytes = self.step.ledger().measured_peak_bytes
        record |= {"tokens_per_s": rate.tokens_per_s, "mfu": rate.mfu, "memory_bytes": self._memory_bytes}
        steps = self.config.run.steps
        self._console.fields(step_fields(record, steps=steps, eta_s=self._meter.eta_s(steps - self.steps_done)))

    def _print_memory(self, ledger: Ledger) -> None:
        predicted, measured = ledger.predicted_peak_bytes, ledger.measured_peak_bytes
        self._console.say(f"memory: predicted {format_bytes(predicted)}, measured {format_bytes(measured)}")
        if predicted != measured:
            self._console.say(f"they differ by {measured - predicted:+,} bytes:\n{ledger}")

    def _not_finite(self, batch: Batch) -> NonFiniteError:
        """Saves the state, which is that of before the step, and says where the run stands."""
        failed = self.steps_done + 1
        # Before saving: a trace runs the step again, and the state that it leaves is the one to keep.
        where = self.step.trace_nonfinite(batch) if self._trace_nan else "run again with --trace-nan to learn in which module it begins"
        self.save(prune=False)  # this state may be bad already, so no earlier one goes for it
        failure = f"the loss of step {failed} of {self.config.run.steps} is NaN or infinite; {where}. Training stopped"
        earlier = self.folder.newest_before(self.steps_done)
        if self._resumed_from is not None and self.steps_here == 0:
            back = f"go back to an earlier one with --resume {earlier}" if earlier else "there is no earlier one in this run, so begin a new run"
            return NonFiniteError(
                f"{failure} at the first step after {self._resumed_from}, which may be bad already: {back}, with a lower optimizer.lr or "
                "optimizer.clip_norm, or a longer schedule.warmup_steps"
            )
        return NonFiniteError(
            f"{failure}, and the state of before that step is saved in {self.folder.checkpoint(self.steps_done)}. Try a lower optimizer.lr or "
            "optimizer.clip_norm, or a longer schedule.warmup_steps, with --resume auto"
            + (f", or go further back with --resume {earlier}" if earlier else "")
        )

    def _extra(self) -> dict[str, Any]:
        return {"steps_done": self.steps_done} | self._circumstances()

    def _circumstances(self) -> dict[str, Any]:
        """What else the bits of a step depend on, beside the state of the step."""
        return {
            "corpus SHA-256": self.corpus.digest,
            "seed": self.config.run.seed,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
        }


def _if_finite(norm: float | None) -> float | None:
    """JSON has no infinity, which the norm of gradients that overflowed is."""
    return norm if norm is not None and math.isfinite(norm) else None


def _is_due(every: int, steps_done: int) -> bool:
    return every > 0 and steps_done % every == 0
