"""Parameters and buffers of a checkpoint -> a model, without the optimizer's state."""

from pathlib import Path

import torch
from torch import Tensor, nn

from packhorse.checkpoint.read import read_checkpoint
from packhorse.errors import CheckpointError


def load_model(model: nn.Module, checkpoint: Path) -> None:
    """Copies the parameters and buffers of the checkpoint folder into `model`. Every byte is checked; only these tensors are read.

    Raises CheckpointError if the checkpoint is not whole, or one of the model's tensors is absent in it or has another shape.
    """
    tensors, _ = read_checkpoint(checkpoint, ("param/", "buffer/"))
    wanted: dict[str, Tensor] = {f"param/{name}": tensor for name, tensor in model.named_parameters()}
    wanted |= {f"buffer/{name}": tensor for name, tensor in model.named_buffers()}
    for name, tensor in wanted.items():
        found = tensors.get(name)
        if found is None or found.shape != tensor.shape:
            seen = "absent" if found is None else tuple(found.shape)
            raise CheckpointError(
                f"{checkpoint} does not fit the model of the run's config.toml: {name!r} is {seen}, expected {tuple(tensor.shape)}; "
                "give a checkpoint of this run"
            )
        with torch.no_grad():
            tensor.copy_(found)
