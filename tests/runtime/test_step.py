"""The compiled step as users meet it: batches of other sizes, modes, evaluation, errors, the ledger, saving."""

import copy
import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import packhorse as ph
from packhorse.errors import BatchError, BudgetError, CaptureError, NonFiniteError, UserError
from packhorse.graph.operators import operator
from zoo import MODELS, batch_for, gpt

pytestmark = pytest.mark.cpu


def make(name="gpt", seed=0, **options):
    torch.manual_seed(seed)
    model = MODELS[name]().train()
    optimizer = options.pop("optimizer", None) or torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return ph.compile(model, ph.plan(model, batch_for(model), optimizer=optimizer, **options)), batch_for(model)


def test_external_tensors_stay_within_their_bound_and_are_exact():
    for name in MODELS:
        step, batch = make(name, clip_norm=1.0)
        step(batch)
        measured = dict(step.ledger().measured)
        assert measured["external"] <= step.plan.external_bytes
        assert measured["external"] == step.plan.external_bytes
        assert measured["arena"] == step.plan.arena_bytes


@pytest.mark.parametrize("name", MODELS)
def test_a_steady_step_allocates_only_in_adopted_rows(name):
    """The allocator's total in a steady step = what the adopting calls allocate on their own."""
    step, batch = make(name, clip_norm=1.0)
    step(batch)
    key = next(k for k in step.programs.bound if k[0] == "first")
    bound = step.programs.bound[key]
    bound.batch.update(step._leaves(batch))
    with torch.no_grad():
        for instruction, run in zip(bound.program.instructions, bound.steps):
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
                run()
            taken = sum(e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]" and e.nbytes() > 0)
            op = getattr(instruction, "op", "copy")
            if op == "copy" or operator(op).kind == "out":
                assert taken <= 64, f"{op} allocates {taken} bytes"  # a wrapped number is a scalar tensor


def test_a_batch_of_another_size_gets_its_own_program():
    step, batch = make()
    plain = copy.deepcopy(step.model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    bigger = batch_for(plain, seed=3, size=7)
    smaller = {k: v[:2, :9] for k, v in batch.items()}
    torch.manual_seed(4)
    wanted = []
    for given in (batch, bigger, smaller, bigger):
        optimizer.zero_grad()
        loss = plain(**given)
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    torch.manual_seed(4)
    got = [step(given).item() for given in (batch, bigger, smaller, bigger)]
    assert got == wanted
    ledger = step.ledger()
    assert ledger.measured_peak_bytes == ledger.predicted_peak_bytes > step.plan.peak_bytes
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), step.model.parameters()))


def test_train_and_eval_mode_get_their_own_programs():
    step, batch = make()
    plain = copy.deepcopy(step.model).eval()
    step.model.eval()
    assert step(batch).item() == plain(**batch).item()


def test_evaluate_is_eval_mode_without_draws_or_changes():
    for name in MODELS:
        step, batch = make(name)
        step(batch)
        plain = copy.deepcopy(step.model).eval()
        other = batch_for(plain, seed=9, size=3)
        state, before = torch.get_rng_state(), step.state_dict()
        with torch.no_grad():
            wanted = plain(**other).item()
        assert step.evaluate(other) == wanted
        assert torch.equal(state, torch.get_rng_state())
        assert all(torch.equal(before[n], t) for n, t in step.state_dict().items())
        assert step.model.training


def test_planning_draws_nothing_and_leaves_the_model_alone():
    torch.manual_seed(0)
    model = MODELS["conv"]().train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    ph.plan(model, batch_for(model), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_the_models_own_tensors_stay_the_live_ones():
    step, batch = make()
    held = dict(step.model.named_parameters())
    step(batch)
    assert all(held[n] is p and torch.equal(p, step.state_dict()[n]) for n, p in step.model.named_parameters())
    step.model.load_state_dict({n: torch.zeros_like(t) for n, t in step.state_dict().items()})
    assert step(batch).item() == pytest.approx(math.log(61), abs=1e-5)  # all logits 0


def test_budget_below_the_least_says_the_least_and_what_is_alive():
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    full = ph.plan(model, batch_for(model), optimizer=optimizer)
    least = ph.plan(model, batch_for(model), optimizer=optimizer, budget="minimum")
    assert least.peak_bytes < full.peak_bytes
    for method, peak in (("none", full.peak_bytes), ("auto", least.peak_bytes)):
        with pytest.raises(BudgetError, match=f"{peak} bytes") as caught:
            ph.plan(model, batch_for(model), optimizer=optimizer, budget=peak - 1, recompute=method)
        assert "gpt.py" in str(caught.value) and "the nearest changes that fit" in str(caught.value)
    for budget in (full.peak_bytes, "100%", "1GiB", None):
        assert ph.plan(model, batch_for(model), optimizer=optimizer, budget=budget).peak_bytes == full.peak_bytes
    for nonsense in ("much", -1, "x%", 1.5):
        with pytest.raises(UserError):
            ph.plan(model, batch_for(model), optimizer=optimizer, budget=nonsense)


def test_a_later_batch_that_breaks_the_budget_is_refused():
    model = gpt()
    plan = ph.plan(model, batch_for(model), optimizer=torch.optim.AdamW(model.parameters()), budget="100%")
    step = ph.compile(model, plan)
    with pytest.raises(BudgetError, match="above the budget"):
        step(batch_for(model, size=40))
    step(batch_for(model))
    assert step.ledger().measured_peak_bytes <= plan.peak_bytes


def test_wrong_batches_are_named():
    step, batch = make()
    for wrong, text in [
        ({**batch, "labels": batch["labels"].float()}, "labels"),
        ({**batch, "ids": batch["ids"][0]}, "ids"),
        ({"ids": batch["ids"]}, "structure"),
        ([batch, batch], "num_micro_batches=1"),
        (3, "dict"),
        ({k: v.numpy() for k, v in batch.items()}, "as_tensor"),
        ({k: v.to("meta") for k, v in batch.items()}, "is on meta"),
    ]:
        with pytest.raises(BatchError, match=text):
            step(wrong)
    assert math.isfinite(step(batch).item())


def test_a_nan_loss_stops_before_the_update_and_is_traced_to_its_module():
    step, batch = make(clip_norm=1.0)
    step(batch)
    with torch.no_grad():
        step.model.blocks[1].feed_forward.up.bias[3] = float("inf")
    before = step.state_dict()
    with pytest.raises(NonFiniteError, match="step 2"):
        step(batch)
    assert all(torch.equal(before[n].nan_to_num(), t.nan_to_num()) for n, t in step.state_dict().items())
    assert "blocks.1.feed_forward.up" in step.trace_nonfinite(batch)
    with torch.no_grad():
        step.model.blocks[1].feed_forward.up.bias[3] = 0
    assert "finite" in step.trace_nonfinite(batch)


def test_misuse_is_refused_with_a_reason():
    model = gpt()
    batch = batch_for(model)
    with pytest.raises(UserError, match="not the model's"):
        ph.plan(model, batch, optimizer=torch.optim.AdamW(gpt().parameters()))
    with pytest.raises(UserError, match="not supported"):
        ph.plan(model, batch, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UserError, match="another model"):
        other = gpt()
        ph.compile(other, ph.plan(model, batch, optimizer=torch.optim.AdamW(model.parameters())))
    with pytest.raises(CaptureError, match="nothing to train"):
        frozen = gpt().requires_grad_(False)
        ph.plan(frozen, batch, optimizer=torch.optim.AdamW(gpt().parameters()) if False else torch.optim.AdamW(frozen.parameters()))
    for option in ({"precision": "int8"}, {"grad_dtype": torch.int32}, {"zero_stage": 4}, {"recompute": "some"}, {"residency": "moon"}):
        with pytest.raises(UserError):
            ph.plan(model, batch, optimizer=torch.optim.AdamW(model.parameters()), **option)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UserError, match=r"loss is a str, .*called as loss\(output, batch\)"):
        ph.plan(model, batch, optimizer=optimizer, loss="mse")
    with pytest.raises(UserError, match=r"pass the original module: model\._orig_mod"):
        ph.plan(torch.compile(model, backend="eager"), batch, optimizer=optimizer)
    with pytest.raises(UserError, match=r"wrapped in DataParallel; pass model\.module"):
        ph.plan(torch.nn.DataParallel(model), batch, optimizer=optimizer)
    with pytest.raises(BatchError, match="given a list of 2 batches, num_micro_batches is 1; set num_micro_batches=2"):
        ph.plan(model, [batch, batch], optimizer=optimizer)
    with pytest.raises(BatchError, match=r"a list of 0 batches, .*at least one"):
        ph.plan(model, [], optimizer=optimizer)
    step = ph.compile(model, ph.plan(model, batch, optimizer=optimizer))
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(UserError, match="amsgrad"):
        step(batch)
    optimizer.param_groups[0]["amsgrad"] = False
    model.tokens.weight.requires_grad_(False)
    with pytest.raises(UserError, match=r"requires_grad of 'tokens.weight'"):
        step(batch)
    model.tokens.weight.requires_grad_(True)
    step(batch)
    with pytest.raises(BatchError, match=r"given 2 .a list.; pass one batch, or plan again"):
        step([batch, batch])
    ph.compile(model, ph.plan(model, batch, optimizer=optimizer))
    with pytest.raises(UserError, match=r"or the model was planned and compiled again; .*use the newest step"):
        step(batch)
    model.double()
    with pytest.raises(UserError, match="moved, replaced"):
        step(batch)


def test_a_model_on_meta_is_planned_but_not_compiled():
    real = gpt()
    with torch.device("meta"):
        meta = gpt()
    plans = [ph.plan(m, batch_for(real), optimizer=torch.optim.AdamW(m.parameters())) for m in (real, meta)]
    assert plans[0].to_dict() == plans[1].to_dict()
    with pytest.raises(UserError, match="meta device"):
        ph.compile(meta, plans[1])


def test_persistent_bytes_in_closed_form():
    """fp32 AdamW: four numbers of 4 bytes a parameter (value, gradient, two moments); nothing else above a padding of 64 bytes a tensor."""
    step, _ = make()
    num = sum(p.numel() for p in step.model.parameters())
    kinds = step.programs.persistent.bytes_by_kind()
    assert kinds["parameters"] == kinds["gradients"] == 4 * num
    assert kinds["optimizer states"] == 8 * num + 4 * len(list(step.model.parameters()))
    assert 16 * num <= step.plan.persistent_bytes <= 16 * num + 64 * 4 * len(list(step.model.parameters())) + 256


def test_training_state_round_trip_is_bit_equal():
    step, batch = make("conv", clip_norm=1.0)
    for _ in range(3):
        step(batch)
    tensors, meta = step.training_state()
    saved = {n: t.clone() for n, t in tensors.items()}
    wanted = [step(batch).item() for _ in range(3)]
    other, _ = make("conv", seed=99, clip_norm=1.0)
    other.load_training_state(saved, meta)
    assert other.num_steps == 3
    assert [other(batch).item() for _ in range(3)] == wanted
    assert all(torch.equal(a, b) for a, b in zip(step.state_dict().values(), other.state_dict().values()))


def test_kernel_workspaces_are_a_line_of_their_own():
    step, batch = make("conv")
    step(batch, measure_outside=True)
    ledger = step.ledger()
    assert ledger.outside_bytes is not None and ledger.outside_bytes >= 0
    assert "outside the plan" in str(ledger)
    assert ledger.measured_peak_bytes == ledger.predicted_peak_bytes
