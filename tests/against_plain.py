"""AdamW steps of packhorse beside the same ones of plain PyTorch: every bit, and every byte as predicted."""

import copy

import torch

import packhorse as ph


def assert_steps_equal(model: torch.nn.Module, batch: dict, loss=None, steps: int = 3) -> None:
    """`model` is trained; dropout draws the same in both. loss(output, batch), or the model's own."""
    plain = copy.deepcopy(model)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    step = ph.compile(model, ph.plan(model, batch, optimizer=ours, clip_norm=1.0, loss=loss))
    torch.manual_seed(1)
    wanted = []
    for _ in range(steps):
        theirs.zero_grad()
        output = plain(**batch)
        value = loss(output, batch) if loss is not None else getattr(output, "loss", output)
        value.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        theirs.step()
        wanted.append(value.item())
    torch.manual_seed(1)
    assert [step(batch).item() for _ in range(steps)] == wanted
    for (name, a), b in zip(plain.state_dict().items(), model.state_dict().values()):
        assert torch.equal(a, b), name
    ledger = step.ledger()
    assert ledger.measured_peak_bytes == ledger.predicted_peak_bytes
