"""The loop of a run: steps, log lines, evaluations and checkpoints, until the last step or a signal.

Steps count from 1 in all that is printed or saved: "step 100" is the state after 100 optimizer steps.
With several ranks each runs this loop, and all come to the same steps, evaluations and checkpoints; rank 0 alone writes and speaks.
"""

import json
import math
import platform
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packhorse.checkpoint import load, prune_checkpoints, save
from packhorse.data import Corpus
from packhorse.errors import CheckpointError, DataError, NonFiniteError
from packhorse.runtime.together import from_first, together
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

_NO_BATCH = -1  # what a rank says instead of a signal


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
        self.config, self.corpus, self.folder, self.step, self.ranks = config, corpus, folder, step, step.ranks
        self._optimizer, self._meter, self._console, self._trace_nan = optimizer, meter, console, trace_nan
        self._rank = 0 if self.ranks is None else self.ranks.rank
        self._validation: list[tuple[dict[str, Tensor], int]] = validation_batches(config, corpus, self._rank)
        self.steps_done = 0
        self.steps_here = 0  # by this process, since it started or resumed
        self._resumed_from: str | None = None
        self._saved_at: int | None = None
        self._bytes: dict[str, int | None] = {"memory_bytes": None}  # measured when a line was last shown

    def resume(self, checkpoint: str) -> None:
        """Goes to where `checkpoint` was saved. Says so when the data or the machine differ, because bits may then differ too.

        Raises CheckpointError if it is not whole, does not fit, or is not from a run of the trainer.
        """
        extra = load(checkpoint, self.step)
        if not isinstance(extra.get("steps_done"), int):
            raise CheckpointError(f"{checkpoint} does not say after how many steps it was saved; resume from a checkpoint of a run")
        self.steps_done = extra["steps_done"]
        self._resumed_from = checkpoint
        if from_first(self.ranks, lambda: Path(checkpoint).resolve() == self.folder.checkpoint(self.steps_done).resolve()):
            self._saved_at = self.steps_done
        self._console.say(f"resumed from {checkpoint}: step {self.steps_done} of {self.config.run.steps}")
        if self.steps_done >= self.config.run.steps:
            self._console.say("all steps are done already; raise run.steps to train further")
        here = self._circumstances()
        then = {"ranks": 1, "tp ranks": 1} | extra
        changed = [f"{name} was {then.get(name)}, is {here[name]}" for name in here if then.get(name) != here[name]]
        if changed:
            self._console.say(f"the run continues, but not bit for bit: {'; '.join(changed)}")

    def trial_save(self) -> None:
        """Saves before the first step, reads back and removes. Raises CheckpointError if that cannot be done."""
        trial_save(self.folder.checkpoints, self.step, self._extra(), self.config.run, self._console.say, self.ranks)

    def run(self, metrics: MetricsFile | None, stop: StopSignal) -> None:
        """Trains to the last step, or to the end of the step in which `stop` is asked for, and saves there. metrics: rank 0's, None on the others.

        Raises NonFiniteError at a loss that is not finite, and DataError if the data has become unusable, with the state before that step saved.
        """
        run = self.config.run
        # a signal came during the evaluation
        if self.steps_done and not from_first(self.ranks, lambda: metrics is not None and metrics.holds("eval", self.steps_done)):
            self._evaluate_if_due(metrics, stop)
        while self.steps_done < run.steps and (batch := self._next_batch(stop)) is not None:
            _append(metrics, self._one_step(batch))
            if self.steps_here == 2 or (self.steps_here == 1 and self.steps_done == run.steps):
                self._print_memory(self.step.ledger())
            self._evaluate_if_due(metrics, stop)
            if _is_due(run.save_every, self.steps_done):
                self.save()
        self.save()

    def evaluate(self, metrics: MetricsFile | None, stop: StopSignal) -> float | None:
        """Mean loss in nats a byte, or a token, over the validation batches, printed and recorded; None if `stop` is asked for meanwhile."""
        started, losses = time.perf_counter(), []
        for batch, weight in self._validation:
            if self.asked_to_stop(stop):
                return None
            losses.append(self.step.evaluate(batch) * weight)
        num_batches = self.config.run.eval_batches
        loss = sum(losses) / num_batches
        num_tokens = num_batches * self.config.data.micro_batch_size * self.config.data.seq_len
        record = {"kind": "eval", "step": self.steps_done, "loss": loss, "num_tokens": num_tokens, "unit": self.corpus.unit}
        _append(metrics, record)
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
            prune_checkpoints(self.folder.checkpoints, run.keep_last, keep_every=run.keep_every, report=self._console.say, ranks=self.ranks)
        # One that was damaged on its way to the disk is set aside by now; the next occasion saves again.
        self._saved_at = self.steps_done if from_first(self.ranks, path.exists) else None
        self._meter.add_other(time.perf_counter() - started)

    def asked_to_stop(self, stop: StopSignal) -> bool:
        """Whether any rank was: all come to the same answer at the same place, though a signal reaches each at another moment."""
        return self._stops(stop, self._tell(stop.received or 0))

    def _next_batch(self, stop: StopSignal) -> Batch | None:
        """What the coming step trains on; None if a rank was asked to stop. If one cannot have its batch, all save, and raise its DataError."""
        received = stop.received  # a signal that comes from here on is for the end of the coming step
        batch, failure = None, None
        try:
            batch = None if received else training_batch(self.config, self.corpus, self.steps_done, self._rank)
        except DataError as error:
            failure = error
        heard = self._tell(_NO_BATCH if failure else received or 0)
        if _NO_BATCH in heard:
            self.save()
            together(self.ranks, lambda: _raise(failure))
        return None if self._stops(stop, heard) else batch

    def _tell(self, number: int) -> list[int]:
        """The number that each rank says here, in the order of the ranks."""
        if self.ranks is None:
            return [number]
        return self.ranks.all_gather(torch.tensor([number]), "signals").view(-1).tolist()

    def _stops(self, stop: StopSignal, heard: list[int]) -> bool:
        """The signal that the first rank has heard of is every rank's."""
        told = next((number for number in heard if number), None)
        if told is not None:
            stop.received = signal.Signals(told)
        return told is not None

    def _evaluate_if_due(self, metrics: MetricsFile | None, stop: StopSignal) -> None:
        if _is_due(self.config.run.eval_every, self.steps_done) and self.steps_done < self.config.run.steps:
            self.evaluate(metrics, stop)

    def _one_step(self, batch: Batch) -> Record:
        run = self.config.run
        lr = self._set_learning_rate()
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
            **self._bytes,
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
        ledger = self.step.ledger()
        elsewhere = {"host_bytes": ledger.measured_host_bytes, "sent_bytes": ledger.measured_comm_bytes}
        self._bytes = {"memory_bytes": ledger.measured_peak_bytes, **{name: num_bytes for name, num_bytes in elsewhere.items() if num_bytes}}
        record |= {"tokens_per_s": rate.tokens_per_s, "mfu": rate.mfu, **self._bytes}
        steps = self.config.run.steps
        self._console.fields(step_fields(record, steps=steps, eta_s=self._meter.eta_s(steps - self.steps_done)))

    def _print_memory(self, ledger: Ledger) -> None:
        predicted, measured = ledger.predicted_peak_bytes, ledger.measured_peak_bytes
        self._console.say(f"memory: predicted {format_bytes(predicted)}, measured {format_bytes(measured)}")
        if predicted != measured:
            self._console.say(f"they differ by {measured - predicted:+,} bytes:\n{ledger}")
        if self.ranks is None:
            return
        sent, foretold = ledger.measured_comm_bytes or 0, ledger.predicted_comm_bytes
        self._console.say(f"sent to other ranks in a step: predicted {format_bytes(foretold)}, measured {format_bytes(sent)}")
        own = {"rank": self._rank, "memory": measured - predicted, "sent": sent - foretold, "peak": predicted}
        others = [json.loads(text) for text in self.ranks.texts(json.dumps(own), "ledgers")]
        largest = max(others, key=lambda other: other["peak"])
        if largest["peak"] != predicted:
            self._console.say(f"that is rank 0; the largest is rank {largest['rank']}'s: {format_bytes(largest['peak'])}")
        wrong = [f"rank {o['rank']}: memory {o['memory']:+,} bytes, sent {o['sent']:+,} bytes" for o in others if o["memory"] or o["sent"]]
        self._console.say("measured and predicted differ: " + "; ".join(wrong) if wrong else "as predicted on every rank, to the byte")

    def _not_finite(self, batch: Batch) -> NonFiniteError:
        """Saves the state, which is that of before the step, and says where the run stands."""
        failed = self.steps_done + 1
        # Before saving: a trace runs the step again, and the state that it leaves is the one to keep.
        where = self._traced(batch) if self._trace_nan else "run again with --trace-nan to learn in which module it begins"
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

    def _traced(self, batch: Batch) -> str:
        if self.ranks is not None:
            return "to learn in which module it begins take that step again on one rank, with --trace-nan: it has the same samples"
        return self.step.trace_nonfinite(batch)

    def _extra(self) -> dict[str, Any]:
        return {"steps_done": self.steps_done} | self._circumstances()

    def _circumstances(self) -> dict[str, Any]:
        """What else the bits of a step depend on, beside the state of the step."""
        return {
            "corpus SHA-256": self.corpus.digest,
            "seed": self.config.run.seed,
            "ranks": self.config.ranks.world_size,
            "tp ranks": self.config.mesh.tp,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
        }


def _if_finite(norm: float | None) -> float | None:
    """JSON has no infinity, which the norm of gradients that overflowed is."""
    return norm if norm is not None and math.isfinite(norm) else None


def _append(metrics: MetricsFile | None, record: Record) -> None:
    if metrics is not None:
        metrics.append(record)


def _raise(failure: DataError | None) -> None:
    if failure is not None:
        raise failure


def _is_due(every: int, steps_done: int) -> bool:
    return every > 0 and steps_done % every == 0
