"""What a plan was made for, besides its graphs: the live optimizer, the loss, the constants. No figure depends on it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from packhorse.capture.batch import Signature
from packhorse.capture.update import state_names
from packhorse.errors import UserError
from packhorse.planning.persistent import Persistent
from packhorse.runtime.storage import views


@dataclass(frozen=True)
class Job:
    """signature: of the planned micro-batch. constants: tensors that the model's code made outside the graph. parameters: name -> the model's
    parameter. modes, structure: of model and optimizer when they were planned."""

    optimizer: torch.optim.Optimizer
    loss: Callable | None
    signature: Signature
    constants: dict[str, Tensor]
    parameters: dict[str, torch.nn.Parameter]
    modes: tuple[tuple[int, bool], ...]
    structure: list[tuple]

    def import_optimizer_state(self, persistent: Persistent, runs: dict[str, Tensor]) -> bool:
        """Takes over the moments and step counts that the torch optimizer already has (from earlier steps or load_state_dict), if it has any.

        Raises UserError if parameters of one run have taken different numbers of steps.
        """
        homes = views(persistent, runs, "state")
        steps: dict[str, set[int]] = {}
        for run in persistent.runs:
            if run.kind != "parameters" or f"step.{run.name.removeprefix('param.')}" not in homes:
                continue
            label = run.name.removeprefix("param.")
            for slot in run.slots:
                state = self.optimizer.state.get(self.parameters[slot.target], {})
                group = next(g for g in self.optimizer.param_groups if any(p is self.parameters[slot.target] for p in g["params"]))
                known = [name for name in state_names(self.optimizer, group) if state.get(name) is not None]
                for name in known:
                    homes[f"{name}.{label}/{slot.target}"].copy_(state[name])
                count = int(state["step"]) if "step" in state else int(bool(known))
                steps.setdefault(label, set()).add(count)
        for label, counts in steps.items():
            if len(counts) > 1:
                raise UserError(
                    f"the optimizer's parameters have taken different numbers of steps ({sorted(counts)}), so their run "
                    f"{label} has no one step count; "
                    "put them into parameter groups of their own"
                )
            homes[f"step.{label}"].fill_(next(iter(counts)))
        return any(counts != {0} for counts in steps.values())

    def expose_optimizer_state(self, persistent: Persistent, runs: dict[str, Tensor]) -> None:
        """Makes optimizer.state what torch's own step would have left there, as views of the runs: its state_dict() is the live one."""
        homes = views(persistent, runs, "state")
        for run in persistent.runs:
            label = run.name.removeprefix("param.")
            if run.kind != "parameters" or f"step.{label}" not in homes:
                continue
            for index, slot in enumerate(run.slots):
                parameter = self.parameters[slot.target]
                group = next(g for g in self.optimizer.param_groups if any(p is parameter for p in g["params"]))
                names = state_names(self.optimizer, group)
                state = {name: homes[f"{name}.{label}/{slot.target}"] for name in names}
                if not isinstance(self.optimizer, torch.optim.SGD):
                    state = {"step": homes[f"step.{label}"][index], **state}
                self.optimizer.state[parameter] = state


def modes_of(model: torch.nn.Module) -> tuple[tuple[int, bool], ...]:
    """Identity and training mode of each module of the model: a program holds for one such tuple."""
    return tuple((id(module), module.training) for module in model.modules())


def group_structure(optimizer: torch.optim.Optimizer) -> list[tuple]:
    """What of each parameter group decides which memory a step needs; it must not change after planning."""
    flags = ("fused", "amsgrad", "nesterov", "maximize")
    return [
        (len(group["params"]), *(bool(group.get(flag)) for flag in flags), group.get("momentum", 0) != 0, group["weight_decay"] != 0)
        for group in optimizer.param_groups
    ]
