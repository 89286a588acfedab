"""A model's parameters and buffers exchanged for others while its forward runs, and everything put back afterwards.

Slots are exchanged by identity: a tensor that stands in several places (a tied weight, a module registered twice) is exchanged in all of them.
What the forward leaves on its modules (a cached activation, a counter) is taken away again; a buffer that it replaced by another tensor is
a change of that buffer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy

import torch
from torch import Tensor

from packhorse.errors import CaptureError


@contextmanager
def substituted(model: torch.nn.Module, exchange: dict[int, Tensor]) -> Iterator[None]:
    """exchange: id of a parameter or buffer -> the tensor to see in its place.

    At the end a buffer slot that holds another tensor than was put there is copied into the one that was, as an in-place change.
    Raises CaptureError if its shape or dtype changed too.
    """
    kept = [(m, dict(m.__dict__), dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    containers = [(v, copy(v)) for _, attributes, _, _ in kept for v in attributes.values() if type(v) in (list, dict, set)]
    placed: list[tuple[torch.nn.Module, str, Tensor]] = []
    try:
        for module, _, parameters, buffers in kept:
            for name, tensor in parameters.items():
                if tensor is not None:
                    module._parameters[name] = exchange[id(tensor)]  # type: ignore[assignment]
            for name, buffer in buffers.items():
                if buffer is not None:
                    module._buffers[name] = exchange[id(buffer)]
                    placed.append((module, name, exchange[id(buffer)]))
        for container, _ in containers:
            if isinstance(container, list):  # nn.LSTM keeps its weights in one as well
                container[:] = [exchange.get(id(item), item) for item in container]
        yield
        for module, name, given in placed:
            _write_back(module, name, given)
    finally:
        for container, before in containers:
            container.clear()
            container.extend(before) if isinstance(container, list) else container.update(before)
        for module, attributes, parameters, buffers in kept:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for slots, original in ((module._parameters, parameters), (module._buffers, buffers)):
                slots.clear()
                slots.update(original)  # type: ignore[arg-type]


def _write_back(module: torch.nn.Module, name: str, given: Tensor) -> None:
    now = module._buffers.get(name)
    if now is given:
        return
    if now is None or now.shape != given.shape or now.dtype != given.dtype:
        seen = "removed" if now is None else f"{now.dtype} of shape {list(now.shape)}"
        raise CaptureError(
            f"the training step cannot be captured: the forward of {type(module).__name__} replaces its buffer {name!r} "
            f"({given.dtype} of shape {list(given.shape)}) by another ({seen}); a plan has fixed sizes: give it its largest size from the start"
        )
    with torch.no_grad():
        given.copy_(now)
