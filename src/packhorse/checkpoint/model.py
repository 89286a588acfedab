"""Parameters and buffers of a checkpoint -> a model, without the optimizer's state."""

from pathlib import Path

import torch
from torch import Tensor, nn

from packhorse.checkpoint.read import open_checkpoint
from packhorse.errors import CheckpointError


def load_model(model: nn.Module, checkpoint: Path) -> None:
    """Copies the parameters and buffers of the checkpoint folder into `model`, one at a time. Every byte is checked; only these tensors are read.

    Raises CheckpointError if the checkpoint is not whole, or one of the model's tensors is absent in it or has another shape.
    """
    saved = open_checkpoint(checkpoint)
    shapes = {name: saved.manifest.tensors[saved.owner(name)][1] for name in (*saved.manifest.tensors, *saved.manifest.aliases)}
    wanted: dict[str, Tensor] = {f"param/{name}": tensor for name, tensor in model.named_parameters()}
    wanted |= {f"buffer/{name}": tensor for name, tensor in model.named_buffers()}
    for name, tensor in wanted.items():
        if shapes.get(name) != tuple(tensor.shape):
            raise CheckpointError(
                f"{checkpoint} does not fit the model of the run's config.toml: {name!r} is {shapes.get(name, 'absent')}, expected "
                f"{tuple(tensor.shape)}; give a checkpoint of this run"
            )
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(saved.whole(name))
