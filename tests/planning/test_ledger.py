"""Where the bytes of a GPT go: the in-place rewrites that the ledger's figures rest on."""

import pytest
import torch

import packhorse as ph
from packhorse.graph.loss_rows import FUSED
from packhorse.models.gpt import GPT
from packhorse.residency.saved import saved_values
from zoo import batch_for, gpt

pytestmark = pytest.mark.cpu


def plan_of(model, micros=1, **options):
    batch = [batch_for(model, seed=k) for k in range(micros)] if micros > 1 else batch_for(model)
    return ph.plan(model, batch, optimizer=torch.optim.AdamW(model.parameters()), num_micro_batches=micros, **options)


def storage_of(planned, op):
    """The roots that share the storage of the first result of the (first) node of an operator."""
    node = next(n for n in planned.graph.nodes if n.op == op)
    return next(s.roots for s in planned.placement.storages if node.outputs[0].name in s.roots)


def test_logits_log_probabilities_and_their_gradient_are_one_storage():
    planned = plan_of(gpt().train()).programs["first"]
    made = {v.name: n.op for n in planned.graph.nodes for v in n.outputs if v is not None}
    assert [made[root] for root in storage_of(planned, FUSED)] == ["aten.mm.default", "aten._log_softmax.default", FUSED]


def test_gradients_are_accumulated_where_they_persist():
    planned = plan_of(gpt().train(), micros=2).programs["next"]
    totals = [o.name for o in planned.graph.outputs if o.role == "grad"]
    homes = planned.placement.homes
    assert all(homes[planned.graph.values[name].root].space == "persistent" for name in totals)
    assert not planned.placement.copies


def test_gradients_of_matrix_products_are_written_straight_home():
    planned = plan_of(gpt().train()).programs["first"]
    copied = {c.target[1] for c in planned.placement.copies}
    assert copied == {n for n, _ in gpt().named_parameters() if ".norm" in n or n.startswith("norm")}  # layer norm's kernel allocates its results


def test_the_lines_add_up_to_the_peak():
    ledger = plan_of(gpt().train(), clip_norm=1.0).to_dict()
    assert sum(ledger["lines"].values()) == ledger["predicted_peak_bytes"] == ledger["peak_bytes"]
    assert ledger["peak_bytes"] == ledger["persistent_bytes"] + ledger["arena_bytes"] + ledger["external_bytes"]
    saved = sum(item["bytes"] for item in ledger["alive"] if item["kind"] == "saved value")
    assert saved == ledger["lines"]["arena: saved values"]
    assert all("gpt.py" in item["place"] for item in ledger["alive"])


def test_parameters_that_the_optimizer_does_not_hold_keep_their_gradient_only():
    model = gpt().train()
    some = [p for n, p in model.named_parameters() if n.startswith("blocks.0")]
    plan = ph.plan(model, batch_for(model), optimizer=torch.optim.AdamW(some), clip_norm=1.0)
    num, num_some = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in some)
    kinds = plan.persistent.bytes_by_kind()
    assert (kinds["parameters"], kinds["gradients"], kinds["optimizer states"]) == (4 * num, 4 * num, 8 * num_some + 4 * len(some))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    step = ph.compile(model, plan)
    step(batch_for(model))
    moved = {n for n, p in model.named_parameters() if not torch.equal(before[n], p)}
    assert moved == {n for n, _ in model.named_parameters() if n.startswith("blocks.0")}
    assert set(step.grads()) == {n for n, _ in model.named_parameters()}


def test_what_waits_on_the_host_is_no_line_of_the_peak_and_is_back_in_the_backward_pass():
    """Five outputs of a ReLU, 4 x 8 floats each."""
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(5)))
    options = {"residency": "offload", "host_budget": "1GiB", "loss": lambda output, batch: output.square().mean()}
    plan = ph.plan(model, torch.zeros(4, 8), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **options)
    ledger = plan.to_dict()
    assert sum(ledger["lines"].values()) == ledger["peak_bytes"]
    assert (ledger["offloaded_values"], ledger["offloaded_bytes"], ledger["sharded_values"]) == (5, 5 * 128, 0)
    assert ledger["host_bytes"] == 5 * 128 and ledger["lines"]["arena: saved values"] == 0
    back = [item for item in ledger["alive"] if item["kind"] == "saved value, back"]
    assert back and sum(item["bytes"] for item in back) == ledger["lines"]["arena: saved values that came back"]
    assert "residency (offload): 5 saved values of 640 B on the host" in str(plan)
    assert "the device file cpu has no host_link, so copies to and from the host take no time here" in str(plan)


def test_slices_are_saved_values_and_gathers_of_them_no_parameters():
    model, mesh = GPT(vocab=61, layers=1, width=32, heads=4, seq_len=16).train(), ph.Mesh(dp=1, tp=2)
    plan = plan_of(model, residency="shard", mesh=mesh, rank=0)
    ledger = plan.to_dict()
    kept = saved_values(plan_of(model, residency="keep", mesh=mesh, rank=0).programs["first"].graph)
    cut = [s.value.extent_bytes for s in kept if s.replicated and s.value.extent_bytes > 64]
    assert (ledger["sharded_values"], ledger["sharded_bytes"], ledger["offloaded_bytes"]) == (len(cut), sum(cut), 0)
    saved = sum(item["bytes"] for item in ledger["alive"] if item["kind"] in ("saved value", "saved value, slice"))
    assert saved == ledger["lines"]["arena: saved values"] and ledger["lines"]["arena: gathered parameters"] == 0
    assert "the device file cpu has no levels, so collectives beside the computation (tp" in str(plan)


def test_predicted_seconds_are_told_with_their_band_where_links_are_known():
    plan = plan_of(gpt().train(), device="v100-dgx2")
    (line,) = [line for line in str(plan).splitlines() if "step, predicted" in line]
    told = plan.to_dict()
    low, high = (told["seconds"] * share for share in (0.9, 1.25))
    assert line.endswith(f"s   ({low:.3g} to {high:.3g}) on v100-dgx2") and told["seconds_band"] == [0.9, 1.25]
    assert told["seconds"] == sum(plan.device.seconds(node, p.graph.values) for p in plan.programs.values() for node in p.graph.nodes)
    plain = plan_of(gpt().train())
    assert "step, predicted" not in str(plain) and "seconds_band" not in plain.to_dict()
