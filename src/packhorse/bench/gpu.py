"""`packhorse bench gpu` (`make gpu-check`): equality, canary and speed on one accelerator, in one short run.

A GPT with dropout takes five AdamW steps by eager PyTorch and by packhorse from the same weights and generator state. Prints whether losses
and parameters are bit-equal, predicted against measured bytes, and the ratio of step times. Exit code 1 if anything is not as promised.
"""

import argparse
import copy
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch

import packhorse
from packhorse.bench.rivals import starting_point
from packhorse.errors import UserError


def _seconds(step: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def measure(shape: dict[str, int], rounds: int) -> dict[str, Any]:
    """All figures as JSON-able values. Raises UserError where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise UserError(
            "bench gpu: torch sees no CUDA device on this machine (torch.cuda.is_available() is False); run it where one is, or packhorse bench step"
        )
    model, batch = starting_point(shape, 0.1, seed=0)
    model = model.cuda()
    batch = {key: tensor.cuda() for key, tensor in batch.items()}
    plain = copy.deepcopy(model)
    theirs, ours = (torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True) for m in (plain, model))
    step = packhorse.compile(model, packhorse.plan(model, batch, optimizer=ours, clip_norm=1.0))

    def eager() -> torch.Tensor:
        theirs.zero_grad(set_to_none=False)
        loss = plain(**batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        theirs.step()
        return loss.detach()

    losses = []
    for run in (eager, lambda: step(batch)):
        torch.manual_seed(1)
        losses.append([float(run()) for _ in range(5)])
    same = all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), model.state_dict().values()))
    pairs = [(_seconds(eager), _seconds(lambda: step(batch))) for _ in range(rounds)]
    ledger = step.ledger()
    return {
        "device": torch.cuda.get_device_name(),
        "losses_equal": losses[0] == losses[1],
        "parameters_equal": same,
        "largest_difference": max(float((a - b).abs().max()) for a, b in zip(plain.parameters(), model.parameters())),
        "predicted_peak_bytes": ledger.predicted_peak_bytes,
        "measured_peak_bytes": ledger.measured_peak_bytes,
        "step_over_eager": statistics.median(b / a for a, b in pairs),
    }


def run(arguments: list[str], *, as_json: bool) -> int:
    """The command; exit code 1 if bits or bytes are not as promised."""
    parser = argparse.ArgumentParser(prog="packhorse bench gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"layers": 8, "width": 512, "heads": 8, "seq-len": 512, "vocab": 8192, "batch": 8, "rounds": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args(arguments)
    found = measure({key: getattr(asked, key) for key in ("layers", "width", "heads", "seq_len", "vocab", "batch")}, asked.rounds)
    print(json.dumps(found) if as_json else "\n".join(f"{key}: {value}" for key, value in found.items()))
    kept = found["losses_equal"] and found["parameters_equal"] and found["predicted_peak_bytes"] == found["measured_peak_bytes"]
    return 0 if kept else 1
