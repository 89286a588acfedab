"""Persistent storage in real memory: the runs of a plan allocated, filled from the model, and the model's tensors made views of them."""

import torch
from torch import Tensor

from packhorse.capture.dtypes import LONG
from packhorse.capture.trace import distinct
from packhorse.errors import UserError
from packhorse.planning.persistent import Persistent, Slot, holds_models_own
from packhorse.runtime.arena import zeroed
from packhorse.runtime.deferred import made, recipe_of


def allocate(persistent: Persistent, device: torch.device) -> dict[str, Tensor]:
    """Run name -> zeroed byte tensor of the run's size, 64-byte aligned, on the device or on the host; but for the lent ones, which lie in the memory
    of the arena."""
    here = [run for run in persistent.runs if run.name not in persistent.lent and not run.on_host]
    there, is_far = torch.device("cpu"), device.type != "cpu"
    found = {run.name: zeroed(run.num_bytes, device) for run in here}
    return found | {run.name: zeroed(run.num_bytes, there, pinned=is_far) for run in persistent.runs if run.on_host}


def view(run: Tensor, slot: Slot) -> Tensor:
    """One tensor of a run."""
    dtype = LONG[slot.value.dtype]
    typed = torch.empty(0, dtype=dtype, device=run.device)
    return typed.set_(run.untyped_storage(), (run.storage_offset() + slot.offset) // dtype.itemsize, slot.value.shape, slot.value.strides)


def views(persistent: Persistent, runs: dict[str, Tensor], role: str) -> dict[str, Tensor]:
    """target -> tensor, for every slot of a role."""
    return {slot.target: view(runs[run.name], slot) for run in persistent.runs for slot in run.slots if slot.role == role}


def move_model(model: torch.nn.Module, persistent: Persistent, runs: dict[str, Tensor]) -> None:
    """Copies parameters and buffers into their runs and makes the model's own tensors views of them: they stay the live ones. Those of a model made
    by `packhorse.deferred` get their values here, one after another."""
    tensors = distinct(model.named_parameters(remove_duplicate=False)) | distinct(model.named_buffers(remove_duplicate=False))
    homes = own_parameters(persistent, runs) | views(persistent, runs, "buffer")
    masters = views(persistent, runs, "master")
    recipe, known_as = recipe_of(tensors)
    name_of = {known: name for name, known in known_as.items()}
    values = tensors.items() if recipe is None else ((name_of[known], value) for known, value in made(recipe, next(iter(runs.values())).device))
    with torch.no_grad():
        for name, value in values:
            if name in masters:
                masters[name].copy_(value)
            homes[name].copy_(value)
            if recipe is None:
                tensors[name].data = homes[name]
                continue
            home = homes[name]
            if isinstance(tensors[name], torch.nn.Parameter):
                home = torch.nn.Parameter(home, tensors[name].requires_grad)
            torch.utils.swap_tensors(tensors[name], home)


def load_constants(persistent: Persistent, runs: dict[str, Tensor], constants: dict[str, Tensor]) -> None:
    """Copies constants to where they persist; those without a value keep theirs."""
    for name, home in views(persistent, runs, "constant").items():
        if name in constants:
            home.copy_(constants[name])


def own_parameters(persistent: Persistent, runs: dict[str, Tensor]) -> dict[str, Tensor]:
    """name -> the model's own parameter: its master weight where the step computes with a copy in fewer bits."""
    return {slot.target: view(runs[run.name], slot) for run in persistent.runs if holds_models_own(run) for slot in run.slots}


def homes_of(model: torch.nn.Module) -> dict[str, tuple[int, bool]]:
    """Name -> (data pointer, requires_grad) of each distinct parameter and buffer."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: (tensor.data_ptr(), tensor.requires_grad) for name, tensor in distinct(named).items()}


def check_model(model: torch.nn.Module, homes: dict[str, tuple[int, bool]]) -> None:
    """Raises UserError if a parameter or buffer no longer lies where the plan put it, or was frozen or unfrozen. homes: as after compiling."""
    now = homes_of(model)
    if now == homes:
        return
    frozen = [name for name in homes if name in now and now[name][1] != homes[name][1]]
    if frozen:
        raise UserError(
            f"requires_grad of {frozen[0]!r} was changed since packhorse.compile; a plan holds for one set of "
            f"trained parameters: plan and compile again"
        )
    moved = next(name for name in [*homes, *now] if now.get(name) != homes.get(name))
    raise UserError(
        f"{moved!r} of the model has been moved, replaced, added or removed since packhorse.compile (by "
        f".to(), .half(), a new Parameter, .data = ...), or the model was planned and compiled again; "
        "change values in place (load_state_dict, copy_), use the newest step, or plan and compile again"
    )
