"""The compiled step: one optimizer step of a model, run by its programs. What `packhorse.compile` returns."""

import math
import warnings
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor

from packhorse.capture.batch import canonical, micro_batches, signature, tensors_of
from packhorse.capture.generators import generators_of
from packhorse.capture.precision import is_narrow
from packhorse.capture.trace import device_of
from packhorse.errors import BatchError, CheckpointError, NonFiniteError, UserError
from packhorse.graph.ir import Graph
from packhorse.planning.ledger import Ledger, ledger_of
from packhorse.planning.plan import Plan
from packhorse.runtime.allocator import AllocatorWatch
from packhorse.runtime.checksum import checksum
from packhorse.runtime.copies import CopyEngine
from packhorse.runtime.executor import BoundProgram, Measured
from packhorse.runtime.held import Piece, numbers, pieces, stacked
from packhorse.runtime.job import Job
from packhorse.runtime.loss_scale import LEAST, LossScale
from packhorse.runtime.plain import from_plain, to_plain
from packhorse.runtime.programs import Programs
from packhorse.runtime.random import default_generator, random_state, set_random_state
from packhorse.runtime.rank_random import is_random, named, resumed, streams
from packhorse.runtime.ranks import Ranks
from packhorse.runtime.reference import first_nonfinite
from packhorse.runtime.sharded import description, gathered, own_runs, spread_model
from packhorse.runtime.storage import allocate, check_model, homes_of, load_constants, move_model, own_parameters, views
from packhorse.runtime.transport import Transport

MANY_PROGRAMS = 32  # a step with so many is told that it may be making one for each value of something


@dataclass(frozen=True)
class StepResult:
    """What the last step did. Norms are None where the plan has neither clip_norm nor a loss scale: the 2-norm of all gradients, unscaled, before and
    after clipping.

    loss_scale: of this step, in fp16. skipped: gradients overflowed at it, and no parameter was changed.
    """

    loss: float
    grad_norm: float | None
    clipped_norm: float | None
    loss_scale: float | None = None
    skipped: bool = False


class Step:
    """One optimizer step, planned. Call it with a batch (a list is micro-batches); it returns the mean loss as a 0-dim tensor.

    The model's own parameters and buffers are the live ones and may be read at any time; values are changed in place only.
    Batches of other sizes than the planned one get programs of their own, made when first seen and kept.
    """

    def __init__(self, model: torch.nn.Module, plan: Plan, scheduler: Any = None):
        job: Job = plan.job
        self.model, self.plan, self.job, self.scheduler = model, plan, job, scheduler
        self.device = device_of(model)
        self.ranks = None if plan.zero is None else Ranks(plan.options.mesh, plan.options.rank, self.device)
        if self.ranks is not None:
            self.ranks.require_same(description(plan))
        self.runs = allocate(plan.persistent, self.device)
        if self.ranks is None:
            move_model(model, plan.persistent, self.runs)
        else:
            spread_model(model, plan.persistent, self.runs, self.ranks)
        load_constants(plan.persistent, self.runs, job.constants)
        self.generators = self._generators()
        axes: dict[str, Transport | CopyEngine] = {} if self.ranks is None else {**self.ranks.axes}
        if plan.options.host_budget is not None:
            axes["host"] = CopyEngine(plan.device.host_link)
        self.programs = Programs(model, plan, self.runs, self.device, self.generators, axes)
        self.loss_scale = LossScale() if job.widths.scaled else None
        self._take_over_optimizer_state()
        self.homes = homes_of(model)
        self.metrics = views(plan.persistent, self.runs, "metric")
        self.seed = views(plan.persistent, self.runs, "constant")["seed"]  # what the backward pass starts from
        self._write_scale()
        self._loaded = True
        self.measured: dict[str, Measured] = {}
        self.ran: list[tuple] = []  # keys of the programs of the last step
        self.last: StepResult | None = None
        self.num_steps = 0
        self._skipped = False
        self.outside_bytes: int | None = None
        self.comm_bytes = 0

    # -- one step -------------------------------------------------------------------------------------------------------------------

    def __call__(self, batch: Any, measure_outside: bool = False) -> Tensor:
        """One optimizer step. Returns the mean loss over micro-batches.

        measure_outside: watch the allocator during this step (slower), so that the ledger can say what kernels used besides their results.
        Raises BatchError for a batch of another kind than the plan's, BudgetError if its size needs more than the budget, and NonFiniteError, before
        any parameter is changed, if the loss is NaN or infinite (the random state is put back; running statistics have moved). With several ranks
        also PeerError if another one fails or is gone; what it said is in the message.
        """
        with nullcontext() if self.ranks is None else self.ranks.board.telling():
            return self._step(batch, measure_outside)

    def _step(self, batch: Any, measure_outside: bool) -> Tensor:
        self._check()
        scale = None if self.loss_scale is None else self.loss_scale.value
        micros = micro_batches(batch, self.plan.options.num_micro_batches)
        # all programs first: making one may move the arena of the others
        keys = [self.programs.key_of(self._micro_name(index), micro) for index, micro in enumerate(micros)]
        programs = [self.programs.bound[key] for key in keys]
        around = ("agree", "norm", "update") if self.ranks is None else ("loss", "norm", "update")
        self.ran = [key for name in around if (key := (name,)) in self.programs.bound] + keys
        sent = 0
        if self.ranks is not None:
            sent = self.ranks.sent_bytes
            given = checksum(tensor for micro in micros for tensor in tensors_of(micro)) if self.ranks.mesh.tp > 1 else None
            self.ranks.greet(self.num_steps + 1, self.programs.collectives(keys), given)
            before = self.ranks.sent_bytes
            self._agree()  # once, after loading: what it sends is not of this step
            sent += self.ranks.sent_bytes - before
        if measure_outside:
            with AllocatorWatch(self.device) as watch:
                loss = self._run(micros, programs)
            external = max(m.external_bytes for m in self.measured.values())
            # the two peaks may be at different instants, so this is the least that kernels used besides their results
            self.outside_bytes = max(0, watch.peak_bytes - external)
        else:
            loss = self._run(micros, programs)
        self.num_steps += 1
        if self.ranks is not None:
            self.comm_bytes = self.ranks.sent_bytes - sent
        skipped = self._skipped
        if self.optimizer_state is None and not skipped:
            self._expose_optimizer_state()
        if self.scheduler is not None and not skipped:
            with warnings.catch_warnings():  # torch sees that its optimizer's own step is never called
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                self.scheduler.step()
        self.last = StepResult(loss.item(), *self._norms(), scale, skipped)
        loss.backward = _no_second_backward  # type: ignore[method-assign]
        return loss

    def _micro_name(self, index: int) -> str:
        """The program of the step's micro-batch number `index`."""
        k = self.plan.options.num_micro_batches
        if index == 0:
            return "first"
        return "last" if index == k - 1 and self.plan.zero is not None and "last" in self.plan.zero.names(k) else "next"

    def _agree(self) -> dict[str, Measured]:
        """16-bit copies and master weights. With several ranks nobody changes the model in between: once, after it was loaded."""
        if self.ranks is None or self._loaded:
            self._loaded = False
            return self.programs.run("agree")
        return {}

    def _run(self, micros: list[Any], programs: list[BoundProgram]) -> Tensor:
        before = random_state(self.device, self.generators)
        self._write_scale()
        try:
            measured = self._agree()
            measured |= {f"micro {k}": program.run(self._leaves(micro)) for k, (program, micro) in enumerate(zip(programs, micros))}
        except BaseException:
            set_random_state(before, self.device, self.generators)
            raise
        measured |= self.programs.run("loss")
        loss = self.metrics["loss"].clone()
        what = f"the loss is {loss.item()}{self._of_ranks()}"
        finite = math.isfinite(loss.item())
        measured |= self.programs.run("norm")
        if finite and self.loss_scale is not None and not math.isfinite(self.metrics["grad_norm"].item()):
            finite, what = False, f"the norm of the gradients is {self.metrics['grad_norm'].item()}"
        if not finite and (self.loss_scale is None or self.loss_scale.value <= LEAST):
            set_random_state(before, self.device, self.generators)
            at_scale = "" if self.loss_scale is None else f" at a loss scale of {self.loss_scale.value:g}, which halving has not cured"
            raise NonFiniteError(
                f"step {self.num_steps + 1}: {what}{at_scale}; parameters and optimizer states are those of before this step; "
                "lower the learning rate, clip the gradients (clip_norm), or look at the batch; step.trace_nonfinite(batch) "
                "names the module where it first appears"
            )
        self._skipped = not finite
        if self._skipped:
            self.ran.remove(("update",))
        else:
            measured |= self.programs.run("update")
        if self.loss_scale is not None:
            self.loss_scale.update(self._skipped)
        self.measured = measured
        return loss

    def _write_scale(self) -> None:
        """What the backward pass starts from, and what gradients are multiplied by: both know the loss scale."""
        scale = 1.0
        if self.loss_scale is not None:
            self.loss_scale.check()
            scale = self.loss_scale.value
            self.metrics["inverse_scale"].fill_(1 / scale)
        self.seed.fill_(scale / (self.plan.options.num_micro_batches * self.plan.options.mesh.dp))

    def _of_ranks(self) -> str:
        """Which dp ranks have a loss that is not finite, in words; nothing where there is one."""
        mesh = self.plan.options.mesh
        if mesh.dp == 1:
            return ""
        bad = [str(rank) for rank, loss in enumerate(self.metrics["losses"].tolist()) if not math.isfinite(loss)]
        return f" (that of {'dp ' if mesh.tp > 1 else ''}rank {', '.join(bad)})" if bad else ""

    def _take_over_optimizer_state(self) -> None:
        """What the torch optimizer holds becomes the step's, and its state views of the runs."""
        self.optimizer_state: Any = None
        if self.job.import_optimizer_state(self.plan.persistent, self.runs):
            self._expose_optimizer_state()

    def _expose_optimizer_state(self) -> None:
        if self.ranks is not None:  # this rank has a part of it only
            self.optimizer_state = self.job.optimizer.state
            return
        self.job.expose_optimizer_state(self.plan.persistent, self.runs)
        self.optimizer_state = self.job.optimizer.state

    def _check(self) -> None:
        """Model and optimizer are still those that were planned; an optimizer state loaded since is taken over."""
        if self.job.optimizer.state is not self.optimizer_state:  # before the first step always: states start at the settings of that step
            self._take_over_optimizer_state()
        check_model(self.model, self.homes)
        if self.job.generators:
            self.job.check_generators(generators_of(self.model), "now")
        self.job.check_structure()

    def _norms(self) -> tuple[float | None, float | None]:
        if "grad_norm" not in self.metrics:
            return None, None
        norm = self.metrics["grad_norm"].item()
        return norm, norm * (self.metrics["clip_coefficient"].item() if "clip_coefficient" in self.metrics else 1.0)

    def evaluate(self, batch: Any) -> float:
        """The loss of one batch in eval mode, without gradients, planned in the same arena; the mean over dp ranks, each with its own batch. Draws
        nothing, changes nothing."""
        with nullcontext() if self.ranks is None else self.ranks.board.telling():
            return self._evaluate(batch)

    def _evaluate(self, batch: Any) -> float:
        self._check()
        batch = canonical(batch)
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            bound = self.programs.bound[self.programs.key_of("evaluate", batch)]
        finally:
            for module, mode in modes.items():
                module.training = mode
        before = random_state(self.device, self.generators)
        self._agree()
        try:
            bound.run(self._leaves(batch))
        finally:
            set_random_state(before, self.device, self.generators)
        self.programs.run("loss")
        return self.metrics["loss"].item()

    def trace_nonfinite(self, batch: Any) -> str:
        """Where NaN or infinity first appears in a step on this batch: operator, module and source line. Changes nothing. One rank only."""
        if self.ranks is not None:
            return "with several ranks a step is not traced; load the checkpoint on one rank (without a mesh) and trace this batch there"
        before = random_state(self.device, self.generators)
        self._write_scale()
        self.programs.run("agree")
        try:
            for micro in micro_batches(batch, self.plan.options.num_micro_batches):
                graph = self.programs.planned[self.programs.key_of("first", micro)].graph
                found = first_nonfinite(graph, self._inputs(graph, micro), self.generators)
                if found:
                    return found
        finally:
            set_random_state(before, self.device, self.generators)
        return "every tensor of the forward and backward pass is finite"

    # -- what programs read -------------------------------------------------------------------------------------------------------

    def _leaves(self, micro: Any) -> dict[str, Tensor]:
        leaves = {leaf.path: tensor for leaf, tensor in zip(signature(micro).leaves, tensors_of(micro))}
        for name, tensor in leaves.items():
            if tensor.device != self.device:
                raise BatchError(
                    f"batch tensor {name!r} is on {tensor.device}, expected {self.device}, where the model is; move it with .to({str(self.device)!r})"
                )
        return leaves

    def _inputs(self, graph: Graph, micro: Any) -> dict[str, Tensor]:
        """Copies of everything that a graph reads, by value name."""
        tables = {role: views(self.programs.persistent, self.runs, role) for role in ("param", "master", "buffer", "constant", "grad", "metric")}
        tables["batch"] = self._leaves(micro)
        return {i.value.name: tables[i.role][i.target].clone() for i in graph.inputs if i.role != "random"}

    # -- what is known --------------------------------------------------------------------------------------------------------------

    def predicted_peak_bytes(self) -> int:
        """What the programs of the last step need together; before the first step, the plan's peak."""
        return self.programs.peak_bytes(self.ran) if self.ran else self.plan.peak_bytes

    def ledger(self) -> Ledger:
        """Predicted and measured bytes of this rank, both of the last step; before the first, the plan's (and None measured).

        measured_peak_bytes = bytes of persistent storage + arena up to the highest byte written + adopted tensors at their peak.
        """
        ledger = replace(ledger_of(self.plan), predicted_peak_bytes=self.predicted_peak_bytes(), outside_bytes=self.outside_bytes)
        if self.ran:
            ledger = replace(ledger, predicted_host_bytes=self.programs.host_bytes(self.ran))
        if not self.measured:
            return ledger
        on_host = {run.name for run in self.programs.persistent.runs if run.on_host}
        there, persistent = (sum(run.numel() for name, run in self.runs.items() if (name in on_host) is is_host) for is_host in (True, False))
        arena = max(m.arena_bytes for m in self.measured.values())
        external = max(m.external_bytes for m in self.measured.values())
        return replace(
            ledger,
            measured_peak_bytes=persistent + arena + external,
            measured_comm_bytes=self.comm_bytes,
            differences=tuple((name, *sizes) for bound in self.programs.bound.values() for name, sizes in bound.differences.items()),
            measured=(("persistent", persistent), ("arena", arena), ("external", external)),
            measured_host_bytes=there + max(m.host_bytes for m in self.measured.values()),
        )

    def grads(self) -> dict[str, Tensor]:
        """name -> full unclipped gradient of the last step (copies). With a loss scale they are unscaled, and in fp32, where small ones stay."""
        kept: Iterable[tuple[str, Tensor]] = views(self.plan.persistent, self.runs, "grad").items()
        if self.ranks is not None:
            kept = gathered(self.runs, [run for run in self.plan.persistent.runs if run.kind == "gradients"], self.ranks)
        if self.loss_scale is None or self.last is None or self.last.loss_scale is None:
            return {name: tensor.clone() for name, tensor in kept}
        scale = self.last.loss_scale
        return {name: (tensor.float() if is_narrow(tensor.dtype) else tensor) / scale for name, tensor in kept}

    def state_dict(self) -> dict[str, Tensor]:
        """name -> full parameter or buffer on the host (copies), with the model's own names. With several ranks each has to call it, and rank 0 gets
        them; the others get nothing."""
        if self.ranks is None:
            return {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
        kept = {id(tensor): tensor for tensor in self.model.buffers()}
        for name, tensor in gathered(self.runs, own_runs(self.plan.persistent), self.ranks):
            if not self.ranks.rank:
                kept[id(self.job.parameters[name])] = tensor
        if self.ranks.rank:
            return {}
        return {name: kept[id(tensor)].detach().cpu().clone() for name, tensor in self.model.state_dict(keep_vars=True).items()}

    # -- save and resume ------------------------------------------------------------------------------------------------------------

    def training_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """All that the next step depends on: (tensors, JSON-able rest). Tensors are the live ones, not copies. With several ranks they are pieces:
        what this rank holds of each (numbers of the optimizer, such as step counts, are copies)."""
        persistent, rank = self.plan.persistent, self._rank()
        mesh = self.plan.options.mesh
        tensors: dict[str, Any] = {}
        if self.ranks is None:
            tensors |= {f"param/{n}": t for n, t in own_parameters(persistent, self.runs).items()}
            masters = views(persistent, self.runs, "master").items()
            tensors |= {f"master/{n}": t for n, t in masters if t.data_ptr() != tensors[f"param/{n}"].data_ptr()}
            tensors |= {f"buffer/{n}": t for n, t in views(persistent, self.runs, "buffer").items()}
            tensors |= {f"state/{n}": t for n, t in views(persistent, self.runs, "state").items()}
        else:
            tensors |= pieces(persistent, self.runs, self._units(), self.ranks.mesh, rank)
            tensors |= {name: stacked(held, rank) for name, held in self._numbers().items()}
        tensors |= named(random_state(self.device, self.generators), mesh.dp_rank(rank), mesh.tp_rank(rank))
        meta: dict[str, Any] = {
            "num_steps": self.num_steps,
            "groups": [to_plain(_numbers(g), "param_groups") for g in self.job.optimizer.param_groups],
        }
        if self.loss_scale is not None:
            meta["loss_scale"] = self.loss_scale.state()
        if self.scheduler is not None:
            meta["scheduler"] = {"class": type(self.scheduler).__name__, "state": to_plain(self.scheduler.state_dict(), "scheduler")}
        return tensors, meta

    def load_training_state(self, tensors: Mapping[str, Tensor], meta: dict[str, Any]) -> None:
        """Takes over what `training_state` gave: tensors as they are held here, pieces flat. The names and shapes must be this step's (packhorse.load
        checks and explains).

        Raises CheckpointError, before anything changes, where this step has a scheduler and the saved one had another or none.
        """
        saved_scheduler = meta.get("scheduler", {"class": "no scheduler"})
        if self.scheduler is not None and meta["num_steps"] and saved_scheduler["class"] != type(self.scheduler).__name__:
            raise CheckpointError(
                f"the checkpoint was saved with {saved_scheduler['class']}, and this step has {type(self.scheduler).__name__}, which would start "
                f"anew at step {meta['num_steps']}; go on with the scheduler of then, or compile without one, load, and call its step() yourself"
            )
        own, _ = self.training_state()
        with torch.no_grad():
            for name, home in own.items():
                if isinstance(home, Piece):
                    home.take(tensors[name])
                elif not is_random(name):
                    home.copy_(tensors[name])
            for name, held in self._numbers().items():
                for number, saved in zip(held, own[name].held):
                    number.copy_(saved)
        devices = {"cpu": torch.device("cpu"), "cuda": self.device} | {name: g.device for name, g in self.generators.items()}
        mesh, rank = self.plan.options.mesh, self._rank()
        set_random_state(resumed(tensors, devices, mesh.dp_rank(rank), mesh.tp_rank(rank)), self.device, self.generators)
        self._loaded = True
        self.num_steps = meta["num_steps"]
        for group, saved in zip(self.job.optimizer.param_groups, meta["groups"]):
            group.update(from_plain(saved, _numbers(group)))
        if self.loss_scale is not None and "loss_scale" in meta:
            self.loss_scale.load(meta["loss_scale"])
        if self.scheduler is not None and "state" in saved_scheduler:
            self.scheduler.load_state_dict(from_plain(saved_scheduler["state"], self.scheduler.state_dict()))
        if self.job.has_steps(self.plan.persistent, self.runs):
            self._expose_optimizer_state()

    def _generators(self) -> dict[str, Generator]:
        """All that programs draw from besides torch's default one: the model's own, and with several tp ranks the two streams. Those that tp ranks
        have alike start in the state of the first of them."""
        mesh, own = self.plan.options.mesh, self.job.generators
        if self.ranks is None or mesh.tp == 1:
            return own
        states = {}
        for name, generator in {"": default_generator(self.device), **own}.items():
            state = generator.get_state()
            states[name] = self.ranks.all_gather(state.to(self.device), f"random states {name}", "tp")[0].cpu()
        for name, generator in own.items():
            generator.set_state(states[name])
        return own | streams(states[""], mesh.dp_rank(self.ranks.rank), mesh.tp_rank(self.ranks.rank), self.device)

    def _rank(self) -> int:
        return 0 if self.ranks is None else self.ranks.rank

    def _numbers(self) -> dict[str, list[Tensor]]:
        """Numbers that the optimizer keeps, where the runs of units hold them."""
        return {} if self.ranks is None else numbers(self.plan.persistent, self.runs, self._units())

    def _units(self) -> dict[str, str]:
        """Parameter -> its unit, in the order of the model."""
        assert self.plan.zero is not None
        return self.plan.zero.partition.units


def _no_second_backward(*_: Any, **__: Any) -> None:
    """backward() of the loss that a step returns: it has no graph."""
    raise UserError(
        "loss.backward(): step(batch) has run the forward pass, the backward pass and the update, and no graph is kept to go through once more; "
        "step.grads() are the gradients; what else is to be trained on belongs into the loss (packhorse.plan(..., loss=)), more batches into "
        "micro-batches"
    )


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}
