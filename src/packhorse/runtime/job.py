"""What a plan was made for, besides its graphs: the live optimizer, the loss, the constants. No figure depends on it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from packhorse.capture.batch import Signature
from packhorse.capture.flat_storage import Widths
from packhorse.capture.questions import Questions
from packhorse.capture.trace import dense_strides
from packhorse.errors import UserError
from packhorse.optim.elementwise import Elementwise, Group, Needs, is_fused
from packhorse.optim.table import describe
from packhorse.planning.persistent import Persistent, Slot
from packhorse.runtime.optimizers import LiveGroup
from packhorse.runtime.parts import cut_out, in_memory_order
from packhorse.runtime.storage import views
from packhorse.runtime.transport import memory_order


@dataclass(frozen=True)
class Job:
    """widths: how many bits the step computes in. signature: of the planned micro-batch; questions: what the model asked of it. constants: tensors
    that the model's code made outside the graph. generators: name -> each one that the model has or draws from, besides torch's default one.
    parameters: name -> the model's parameter. modes, structure: of model and optimizer when they were
    planned."""

    optimizer: torch.optim.Optimizer
    loss: Callable | None
    widths: Widths
    signature: Signature
    questions: Questions
    constants: dict[str, Tensor]
    generators: dict[str, torch.Generator]
    parameters: dict[str, torch.nn.Parameter]
    modes: tuple[tuple[int, bool], ...]
    structure: "list[GroupStructure]"

    def groups(self) -> list[LiveGroup]:
        """The optimizer's parameter groups, as the update program reads them."""
        described = describe(self.optimizer)
        return [LiveGroup(self.optimizer, described, index) for index in range(len(self.optimizer.param_groups))]

    def check_structure(self) -> None:
        """Raises UserError if what decides the memory of a step was changed in a parameter group since planning; names it."""
        now = group_structure(self.optimizer)
        if now == self.structure:
            return
        changed = "a parameter group was added, removed, or given other parameters"
        described = describe(self.optimizer)
        for index, (then, group) in enumerate(zip(self.structure, self.optimizer.param_groups)):
            names = [name for name in group if _memory(described, then.settings | {name: group[name]}) != then.memory]
            if names:
                changed = f"parameter group {index} of the optimizer was changed in {', '.join(names)}"
        raise UserError(
            f"{changed} since packhorse.plan, which decides what memory a step needs: put it back, or plan and compile again (lr, betas, eps, and "
            "values that stay nonzero may change at any time)"
        )

    def check_generators(self, seen: dict[str, torch.Generator], when: str) -> None:
        """Raises UserError if one of `seen` (name -> generator) is not that of the plan; names it."""
        other = next((name for name, generator in seen.items() if self.generators.get(name) is not generator), None)
        if other is not None:
            raise UserError(
                f"{when} the model draws from another torch.Generator than when it was planned: its {other} was exchanged, or is a new one; seed the "
                "generator that it had (manual_seed, set_state), keep each as an attribute of a module, or plan and compile again"
            )

    def import_optimizer_state(self, persistent: Persistent, runs: dict[str, Tensor]) -> bool:
        """Takes over the states and step counts that the torch optimizer already has (from earlier steps or load_state_dict); what it does not have
        gets its start value. Returns whether there were any steps.

        Raises UserError as check_structure, and where a fused kernel would have to tell a first step from a later one inside one call.
        """
        self.check_structure()
        counts: dict[str, set[float]] = {}
        for target in self._targets(persistent, runs):
            state = self.optimizer.state.get(target.parameter, {})
            starts = {**target.needs.states, **target.needs.numbers}
            known = [name for name in starts if state.get(name) is not None]
            for name, home in target.homes.items():
                if state.get(name) is None:
                    home.fill_(starts.get(name, 0.0))
                else:
                    target.take(name, torch.as_tensor(state[name]))
            if "step" not in target.needs.numbers:
                target.homes["step"].fill_(float(bool(known)))
            if "step" in target.homes:
                counts.setdefault(target.label, set()).add(target.homes["step"].item())
                if len(counts[target.label]) > 1 and is_fused(target.group) and "step" not in target.needs.numbers:
                    raise UserError(
                        f"some parameters of {target.label} are at their first step and some are not, which the optimizer's fused kernel cannot tell "
                        "apart; put them into parameter groups of their own, or set fused=False"
                    )
        return any(found != {0} for found in counts.values())

    def has_steps(self, persistent: Persistent, runs: dict[str, Tensor]) -> bool:
        """Any parameter has been updated before."""
        return any(bool(target.homes["step"] != 0) for target in self._targets(persistent, runs) if "step" in target.homes)

    def expose_optimizer_state(self, persistent: Persistent, runs: dict[str, Tensor]) -> None:
        """Makes optimizer.state what the class's own step would have left there, as views of the runs: its state_dict() is the live one."""
        for target in self._targets(persistent, runs):
            self.optimizer.state[target.parameter] = {name: target.homes[name] for name in [*target.needs.numbers, *target.needs.states]}

    def _targets(self, persistent: Persistent, runs: dict[str, Tensor]) -> "Iterator[_Target]":
        """Every parameter of which the optimizer keeps something."""
        homes = views(persistent, runs, "state")
        slots = {slot.target: slot for run in persistent.runs if run.kind == "optimizer states" for slot in run.slots}
        groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        described = describe(self.optimizer)
        for run in persistent.runs:
            label = run.name.removeprefix("param.")
            for index, slot in enumerate(run.layout.slots if run.kind == "parameters" else ()):
                parameter = self.parameters[slot.target]
                if id(parameter) not in groups:
                    continue
                needs = described.needs_of(groups[id(parameter)])
                found = {name: homes[f"{name}.{label}"][index] for name in needs.kept_numbers if f"{name}.{label}" in homes}
                found |= {name: homes[f"{name}.{label}/{slot.target}"] for name in needs.states if f"{name}.{label}/{slot.target}" in homes}
                if found:  # frozen and unused parameters have none
                    at = {name: slots.get(f"{name}.{label}/{slot.target}") for name in found}
                    yield _Target(label, parameter, groups[id(parameter)], needs, found, at)


@dataclass(frozen=True)
class _Target:
    """A parameter of the run `label`, and where its states and numbers lie, by name; slots: of the states, which part and piece of each lies here."""

    label: str
    parameter: torch.nn.Parameter
    group: Group
    needs: Needs
    homes: dict[str, Tensor]
    slots: dict[str, Slot | None]

    def take(self, name: str, whole: Tensor) -> None:
        """A state or number as it is elsewhere, to where it lies here."""
        home, slot = self.homes[name], self.slots[name]
        if slot is None or (slot.part is None and home.shape == whole.shape):
            home.copy_(whole)
            return
        flat = cut_out(whole, slot.part) if slot.part else in_memory_order(whole, self.parameter.shape, dense_strides(self.parameter))
        memory_order(home).copy_(flat[slot.begin : slot.begin + home.numel()])


def modes_of(model: torch.nn.Module) -> tuple[tuple[int, bool], ...]:
    """Identity and training mode of each module of the model: a program holds for one such tuple."""
    return tuple((id(module), module.training) for module in model.modules())


@dataclass(frozen=True)
class GroupStructure:
    """What of a parameter group decides which memory a step needs; it must not change after planning. settings: the whole group as it was."""

    num_parameters: int
    memory: tuple
    settings: Group = field(compare=False)


def group_structure(optimizer: torch.optim.Optimizer) -> list[GroupStructure]:
    """Of each parameter group."""
    described = describe(optimizer)
    return [GroupStructure(len(group["params"]), _memory(described, group), dict(group)) for group in optimizer.param_groups]


def _memory(described: Elementwise, group: Group) -> tuple:
    return is_fused(group), described.needs_of(group).memory
