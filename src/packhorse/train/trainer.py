"""The loop of a run: steps, log lines, evaluations and checkpoints, until the last step or a signal.

Steps count from 1 in all that is printed or saved: "step 100" is the state after 100 optimizer steps.
"""

import platform
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packhorse.checkpoint import load, prune_checkpoints, save
from packhorse.data import Corpus
from packhorse.errors import CheckpointError, NonFiniteError
from packhorse.train.build import training_batch, validation_batches
from packhorse.train.config import Config
from packhorse.train.console import Console, eval_fields, step_fields
from packhorse.train.engine import Batch, Ledger, Step
from packhorse.train.meter import Meter
from packhorse.train.metrics import MetricsFile, Record
from packhorse.train.run_folder import RunFolder
from packhorse.train.schedule import learning_rate
from packhorse.train.stop import StopSignal
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
        if Path(checkpoint).resolve() == self.folder.checkpoint(self.steps_done).resolve():
            self._saved_at = self.steps_done
        self._console.say(f"resumed from {checkpoint}: step {self.steps_done} of {self.config.run.steps}")
        if self.steps_done >= self.config.run.steps:
            self._console.say("all steps are done already; raise run.steps to train further")
        here = self._circumstances()
        changed = [f"{name} was {extra.get(name)}, is {here[name]}" for name in here if extra.get(name) != here[name]]
        if changed:
            self._console.say(f"the run continues, but not bit for bit: {'; '.join(changed)}")

    def run(self, metrics: MetricsFile, stop: StopSignal) -> None:
        """Trains to the last step, or to the end of the step in which `stop` is asked for, and saves there.

        Raises NonFiniteError at a loss that is not finite, with the state before that step saved.
        """
        run = self.config.run
        while self.steps_done < run.steps and not stop.received:
            record = self._one_step()
            metrics.append(record)
            self._console.record(record)
            if self.steps_here == 2 or (self.steps_here == 1 and self.steps_done == run.steps):
                self._print_memory(self.step.ledger())
            if _is_due(run.eval_every, self.steps_done) and self.steps_done < run.steps:
                self.evaluate(metrics, stop)
            if _is_due(run.save_every, self.steps_done) or stop.received:
                self.save()
        self.save()

    def evaluate(self, metrics: MetricsFile, stop: StopSignal) -> float | None:
        """Mean loss in nats/byte over the validation batches, printed and recorded; None if `stop` is asked for meanwhile."""
        started, losses = time.perf_counter(), []
        for batch in self._validation:
            if stop.received:
                return None
            losses.append(self.step.evaluate(batch))
        loss = sum(losses) / len(losses)
        record = {"kind": "eval", "step": self.steps_done, "loss": loss, "num_bytes": len(losses) * self._validation[0]["ids"].numel()}
        metrics.append(record)
        self._console.record(record)
        self._console.fields(eval_fields(record, steps=self.config.run.steps))
        self._meter.add_other(time.perf_counter() - started)
        return loss

    def save(self) -> None:
        """Saves the present state unless this process has done so, then deletes checkpoints beyond run.keep_last."""
        if self._saved_at == self.steps_done:
            return
        started = time.perf_counter()
        save(self.folder.checkpoint(self.steps_done), self.step, {"steps_done": self.steps_done} | self._circumstances())
        self._saved_at = self.steps_done
        prune_checkpoints(self.folder.checkpoints, self.config.run.keep_last)
        self._meter.add_other(time.perf_counter() - started)

    def _one_step(self) -> Record:
        run = self.config.run
        lr = learning_rate(self.steps_done, steps=run.steps, peak_lr=self.config.optimizer.lr, schedule=self.config.schedule)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        batch = training_batch(self.config, self.corpus, self.steps_done)
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
        norms = self.step.last
        record = {
            "kind": "step",
            "step": self.steps_done,
            "loss": loss,
            "grad_norm": norms.grad_norm,
            "clipped_norm": norms.clipped_norm,
            "lr": lr,
            "step_s": step_s,
            "tokens_per_s": None,
            "mfu": None,
            "memory_bytes": self._memory_bytes,
        }
        if _is_due(run.log_every, self.steps_done) or self.steps_done == run.steps:
            self._log(record)
        return record

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
        self.save()
        return NonFiniteError(
            f"the loss of step {failed} of {self.config.run.steps} is NaN or infinite; {where}. Training stopped, and the state of "
            f"before that step is saved in {self.folder.checkpoint(self.steps_done)}. Try a lower optimizer.lr or optimizer.clip_norm, "
            "a longer schedule.warmup_steps, or an earlier checkpoint, with --resume auto"
        )

    def _circumstances(self) -> dict[str, Any]:
        """What else the bits of a step depend on, beside the state of the step."""
        return {
            "corpus SHA-256": self.corpus.digest,
            "seed": self.config.run.seed,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
        }


def _is_due(every: int, steps_done: int) -> bool:
    return every > 0 and steps_done % every == 0
