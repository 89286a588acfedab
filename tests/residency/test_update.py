"""Optimizer states on the host: the same bits as plain PyTorch and as on the device, bytes by hand, when "auto" takes it, and what is refused."""

from dataclasses import replace

import pytest
import torch

import packhorse as ph
from packhorse.device.device import load_device
from packhorse.device.links import Link
from packhorse.errors import BudgetError, UserError
from packhorse.graph.operators import FROM_HOST, HOST_OPTIMIZE, TO_HOST, WAIT
from packhorse.models.gpt import GPT
from packhorse.planning.timeline import timeline

pytestmark = pytest.mark.cpu
CLIP, STEPS, HOST = 0.5, 4, "1GiB"


def fused_adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def momentum(params):
    return torch.optim.SGD(params, lr=1e-1, momentum=0.9, weight_decay=0.01)


def gpt(dtype=torch.float32):
    torch.manual_seed(0)
    return GPT(vocab=96, layers=2, width=32, heads=2, seq_len=16).to(dtype)


def batch(k=0):
    draw = torch.Generator().manual_seed(k)
    ids = torch.randint(0, 96, (4, 16), generator=draw)
    return {"ids": ids, "labels": ids.roll(1, 1)}


def planned(mode, make=adamw, model=None, **how):
    model = model or gpt()
    how = {"host_budget": HOST} | how
    return model, ph.plan(model, batch(), optimizer=make(model.parameters()), optimizer_residency=mode, **how)


def trained(mode, make, change=None, **how):
    """Losses, and the model afterwards. change: done to the model after two steps."""
    model, plan = planned(mode, make, **how)
    step, losses = ph.compile(model, plan), []
    for k in range(STEPS):
        if change and k == 2:
            change(model)
        losses.append(step(batch(k)).item())
        ledger = step.ledger()
        assert (ledger.measured_peak_bytes, ledger.measured_host_bytes) == (plan.peak_bytes, plan.host_bytes)
    return losses, step.state_dict(), plan


def same(one, other):
    return one[0] == other[0] and one[1].keys() == other[1].keys() and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


def test_like_plain_pytorch():
    model = gpt()
    optimizer, losses = adamw(model.parameters()), []
    for k in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch(k))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    assert same((losses, model.state_dict()), trained("offload", adamw, clip_norm=CLIP))


@pytest.mark.parametrize("make, how", [(fused_adamw, {"precision": "bf16"}), (momentum, {"precision": "fp16"}), (fused_adamw, {"clip_norm": CLIP})])
def test_the_same_bits_as_on_the_device(make, how):
    kept, moved = trained("keep", make, **how), trained("offload", make, **how)
    assert same(kept, moved) and moved[2].persistent.host_bytes > 0 == kept[2].host_bytes
    assert kept[2].persistent_bytes - moved[2].persistent_bytes == moved[2].persistent.host_bytes


def test_bytes_by_hand():
    """Two states of the parameters' bytes and their step counts leave the device; the host gets gradients and parameters for the update besides."""
    (_, kept), (_, moved) = planned("keep", fused_adamw), planned("offload", fused_adamw)
    (parameters,) = [run for run in kept.persistent.runs if run.kind == "parameters"]
    counts = 64 * -(-4 * len(parameters.slots) // 64)
    assert kept.persistent_bytes - moved.persistent_bytes == moved.persistent.host_bytes == 2 * parameters.num_bytes + counts
    assert moved.host_bytes == 4 * parameters.num_bytes + counts
    assert moved.arena_bytes <= kept.arena_bytes and moved.peak_bytes == kept.peak_bytes - 2 * parameters.num_bytes - counts


@pytest.mark.parametrize("dtype, precision", [(torch.float32, "bf16"), (torch.bfloat16, "bf16")])
def test_what_is_changed_in_the_model_is_seen(dtype, precision):
    """In its own wide parameters, which are the master weights, and in its own 16-bit ones, which have master weights beside them."""

    def halve(model):
        with torch.no_grad():
            model.blocks[0].attention.qkv.weight.mul_(0.5)

    kept, moved = (trained(mode, adamw, halve, model=gpt(dtype), precision=precision) for mode in ("keep", "offload"))
    assert same(kept, moved) and kept[0] != trained("keep", adamw, model=gpt(dtype), precision=precision)[0]


def test_groups_come_one_after_another():
    """Of several parameter groups no more than three are on the host for the update at a time: one comes, one is updated, one goes; and copies of one
    run beside the update of another."""
    model = gpt()
    groups = [{"params": list(part.parameters())} for part in (model.tokens, model.positions, *model.blocks, model.norm) if list(part.parameters())]
    optimizer = torch.optim.AdamW(groups)
    slow = replace(load_device(), host_link=Link(1e-5, 1e9))
    plan = ph.plan(model, batch(), optimizer=optimizer, host_budget=HOST, optimizer_residency="offload")
    update = plan.programs["update"].graph
    alive, most = 0, 0
    for node in update.nodes:
        tag = str(dict(node.kwargs).get("tag"))
        alive += node.op == TO_HOST and tag.startswith("to host grad.")
        alive -= node.op == WAIT and tag.startswith("from host new.param.")
        most = max(most, alive)
    assert sum(node.op.startswith(HOST_OPTIMIZE) for node in update.nodes) == len(groups) and most == 3
    sizes = sorted(sum(p.numel() * 4 for p in group["params"]) for group in groups)
    assert plan.programs["update"].host_bytes < 2 * sum(sizes)
    line = timeline(update, slow, ph.Mesh())
    assert sum(line.stalls.values()) < line.busy["to host"] + line.busy["from host"]
    assert [node.op for node in update.nodes].count(TO_HOST) == 2 * len(groups) == 2 * [node.op for node in update.nodes].count(FROM_HOST)


def test_auto_takes_what_the_budget_asks_for():
    """Copies take no time on this device, so that moving states is faster than computing values again; where the budget asks for neither, neither."""
    how = {"recompute": "blocks", "residency": "keep"}
    kept, least = planned("keep", **how)[1].keep_everything_bytes, planned("keep", budget="minimum", **how)[1].peak_bytes
    assert planned("auto", budget=kept, recompute="auto", residency="keep")[1].persistent.host_bytes == 0
    for budget, method in ((least, "auto"), (least - 100_000, "blocks")):
        plan = planned("auto", budget=budget, recompute=method, residency="keep")[1]
        assert plan.peak_bytes <= budget and plan.persistent.host_bytes
    with pytest.raises(BudgetError, match="the least that works"):
        planned("auto", budget=100_000, **how)
    assert not planned("auto")[1].persistent.host_bytes, "without a budget nothing leaves the device"


def test_what_is_refused():
    with pytest.raises(UserError, match="no place for optimizer states; expected one of auto, keep, offload"):
        planned("shard")
    with pytest.raises(UserError, match="host_budget is None"):
        planned("offload", host_budget=None)
    with pytest.raises(BudgetError, match=r"optimizer states on the host need .* there, .* of it states") as error:
        planned("offload", host_budget=1000)
    _, plan = planned("offload")
    assert f"({plan.host_bytes} bytes)" in str(error.value)
    planned("offload", host_budget=plan.host_bytes)


def test_a_checkpoint_of_one_place_goes_on_in_the_other():
    """State of two steps on the host, loaded into a step on the device."""
    model, plan = planned("offload", fused_adamw)
    step = ph.compile(model, plan)
    for k in range(2):
        step(batch(k))
    after, state = {n: t.clone() for n, t in model.state_dict().items()}, plan.job.optimizer.state_dict()
    other = gpt()
    other.load_state_dict(after)
    optimizer = fused_adamw(other.parameters())
    optimizer.load_state_dict(state)
    again = ph.compile(other, ph.plan(other, batch(), optimizer=optimizer, optimizer_residency="keep"))
    for k in (2, 3):
        assert again(batch(k)).item() == step(batch(k)).item()
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), step.state_dict().values()))


def test_the_host_takes_its_time():
    """On a described machine an update runs at the rate of the host's memory."""
    _, plan = planned("offload", fused_adamw, device="v100-dgx2")
    node = next(node for node in plan.programs["update"].graph.nodes if node.op.startswith(HOST_OPTIMIZE))
    device = plan.device
    fast = replace(device, host_bytes_per_s=None)
    values = plan.programs["update"].graph.values
    assert device.seconds(node, values) * device.host_bytes_per_s == pytest.approx(
        (fast.seconds(node, values) - device.roofline.launch_s) * device.roofline.bytes_per_s
    )
