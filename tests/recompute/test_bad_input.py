"""What a user gets wrong about recomputation: one paragraph that says what to do, and what it says is true."""

import copy
import re
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import packhorse as ph
from beside_plain import METHODS, Plain, adamw, assert_methods_like_plain, assert_same, num_mirrors, plans_of
from packhorse.bench.cells import UNet
from packhorse.bench.replan import replanned
from packhorse.cli.main import main
from packhorse.errors import BudgetError, UserError

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def shorter_search(monkeypatch):
    """Other proposals of `optimal`, judged alike."""
    monkeypatch.setattr("packhorse.recompute.improve.NODES_LOOKED_AT", 5_000)


class Layer(nn.Module):
    def __init__(self, width: int = 32):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Net(nn.Module):
    def __init__(self, layers: int = 4):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(layers)), nn.Linear(32, 5)

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), y)


def batch(rows: int = 64) -> dict:
    g = torch.Generator().manual_seed(0)
    return {"x": torch.randn(rows, 32, generator=g), "y": torch.randint(0, 5, (rows,), generator=g)}


def model(layers: int = 3) -> Net:
    torch.manual_seed(0)
    return Net(layers)


def refused(call) -> str:
    with pytest.raises(BudgetError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


# -- a budget below the least --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method, share", [("none", 0.999), ("cheap", 0.95), ("blocks", 0.97), ("optimal", 0.999)])
def test_what_is_said_of_a_budget_below_the_least_is_true(method, share):
    given = batch()
    leanest = next(plans_of(model(), given, (method,), clip_norm=1.0))[2]
    limit = int(leanest.peak_bytes * share)
    said = refused(lambda: next(plans_of(model(), given, (method,), budget=limit, clip_norm=1.0)))
    assert f"({leanest.peak_bytes} bytes)" in said and repr(method) in said

    # the instant and who is alive there: the largest of them are as large as is said, and lie in the program
    values = leanest.programs["first"].graph.values
    place = re.search(r"the peak is at first, time (\d+) of (\d+): (backward|recompute) (aten\.\S+) in (\S+)", said)
    assert place and place[4] == leanest.programs["first"].graph.nodes[int(place[1])].op
    assert place[5] == leanest.programs["first"].graph.nodes[int(place[1])].module != ""
    alive = re.findall(r"([\d.]+) (KiB|B) %(\S+) \((?:forward|backward|recompute) ", said)
    assert len(alive) >= 5
    for number, unit, name in alive:
        assert float(number) * (1024 if unit == "KiB" else 1) == pytest.approx(values[name].extent_bytes, abs=1)
    assert "blocks" not in said or "layers." in said

    # what is said to fit does
    if method != "optimal":
        promised = re.search(r"recompute='optimal', which needs ([\d.]+ \w+)", said)
        assert promised
        plan = next(plans_of(model(), given, ("optimal",), budget=limit, clip_norm=1.0))[2]
        assert plan.peak_bytes <= limit and promised[1] in str(ph.units.format_bytes(plan.peak_bytes))
    if "an optimizer without states" in said:
        mine = model()
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        assert ph.plan(mine, given, optimizer=optimizer, clip_norm=1.0, recompute=method, budget=limit).peak_bytes <= limit
    parts = re.search(r"num_micro_batches=(\d+) with 1/(\d+) of the samples", said)
    assert parts and parts[1] == parts[2]
    k = int(parts[1])
    micros = [{name: tensor[i::k].contiguous() for name, tensor in given.items()} for i in range(k)]
    assert next(plans_of(model(), micros, (method,), budget=limit, clip_norm=1.0))[2].peak_bytes <= limit


def test_nothing_is_promised_where_parameters_and_states_alone_are_too_much():
    plan = next(plans_of(model(), batch(), ("none",)))[2]
    said = refused(lambda: next(plans_of(model(), batch(), ("cheap",), budget=plan.persistent_bytes // 3)))
    assert "no nearer change fits" in said and "which needs" not in said and "num_micro_batches" not in said


def test_no_method_exceeds_its_budget_silently():
    origin = model(2)
    none = ph.plan(origin, batch(), optimizer=adamw(origin.parameters()), recompute="none")
    least = {}
    for method in METHODS:
        mine = model(2)
        least[method] = replanned(none, mine, adamw(mine.parameters()), method, "minimum").peak_bytes
    assert least["optimal"] == min(least.values())
    for limit in (min(least.values()) - 1, *least.values()):
        for method in ("cheap", "chen", "blocks"):
            mine = model(2)
            if limit >= least[method]:
                assert replanned(none, mine, adamw(mine.parameters()), method, limit).peak_bytes <= limit
            else:
                said = refused(lambda: replanned(none, mine, adamw(mine.parameters()), method, limit))  # noqa: B023
                assert ("recompute='optimal', which needs" in said) == (limit >= least["optimal"])


# -- methods -------------------------------------------------------------------------------------------------------------------------------


def test_an_unknown_method_and_milp_on_a_large_graph():
    mine = model(8)
    with pytest.raises(UserError, match=r"recompute='sqr' is no method; expected auto or one of none, cheap, sqrt, chen"):
        ph.plan(mine, batch(), optimizer=adamw(mine.parameters()), recompute="sqr")
    with pytest.raises(UserError, match=r"recompute='milp' .* nodes, expected 60 at most; take recompute='optimal'") as error:
        ph.plan(mine, batch(), optimizer=adamw(mine.parameters()), recompute="milp")
    assert "\n" not in str(error.value)


class OneBlock(nn.Module):
    """Every layer reads all before it and the input: nothing to cut."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32 * k, 32) for k in range(1, 6))

    def forward(self, x, y):
        found = [x * 1.0]
        for layer in self.layers:
            found.append(F.dropout(torch.tanh(layer(torch.cat(found, -1))), 0.1, self.training))
        return F.cross_entropy(sum(found), y)


def test_methods_for_chains_work_on_graphs_that_are_none():
    torch.manual_seed(0)
    assert_methods_like_plain(OneBlock(), batch(), methods=("sqrt", "chen", "recursive", "blocks"), mirrors=False)
    images = {"images": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    plans = assert_methods_like_plain(UNet(4, 2), images, methods=("sqrt", "chen", "recursive"), mirrors=False)
    assert any(num_mirrors(plan) for plan in plans.values())


class OneLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 5)

    def forward(self, x, y):
        return F.cross_entropy(self.fc(x), y)


def test_a_model_of_one_layer():
    torch.manual_seed(0)
    mine = OneLayer()
    plain = Plain(mine, [batch()], steps=2)
    for method, copied, plan in plans_of(mine, batch(), (*METHODS, "milp"), clip_norm=1.0):
        assert_same(ph.compile(copied, plan), batch(), plain, method)


# -- marks ---------------------------------------------------------------------------------------------------------------------------------


class Marked(nn.Module):
    """mark(value) -> the value, once on what is saved and once on what is not."""

    def __init__(self, saved, unsaved):
        super().__init__()
        self.a, self.b, self.saved, self.unsaved = nn.Linear(32, 32), nn.Linear(32, 5), saved, unsaved

    def forward(self, x, y):
        h = self.saved(torch.tanh(self.a(x)))
        return F.cross_entropy(self.unsaved(self.b(h) + 1.0), y)


def same(x):
    return x


@pytest.mark.parametrize("mark, said", [(lambda x: ph.keep(x, "logits"), "ph.keep 'logits'"), (ph.drop, "ph.drop")])
def test_a_mark_on_a_value_that_is_not_saved(mark, said):
    torch.manual_seed(0)
    mine = Marked(same, mark)
    for method in ("none", "sqrt", "optimal"):
        with pytest.raises(
            UserError, match=said + r" in module .* at test_bad_input.py:\d+ marks a value that the backward pass does not read"
        ) as error:
            ph.plan(mine, batch(), optimizer=adamw(mine.parameters()), recompute=method)
        assert "\n" not in str(error.value)


def test_marks_are_obeyed_by_every_method_and_bits_stay():
    torch.manual_seed(0)
    origin = Marked(same, same)
    plain = Plain(origin, [batch()], steps=2)
    for number, method in enumerate(("none", *METHODS)):
        dropped = number % 2 == 0
        mine = copy.deepcopy(origin)
        mine.saved = ph.drop if dropped else lambda x: ph.keep(x, "hidden")
        plan = ph.plan(mine, batch(), optimizer=adamw(mine.parameters()), clip_norm=1.0, recompute=method, budget="minimum")
        again = any(n.op == "aten.tanh.default" and n.phase == "recompute" for n in plan.programs["first"].graph.nodes)
        assert again == dropped, method
        assert_same(ph.compile(mine, plan), batch(), plain, method)


# -- the command line ------------------------------------------------------------------------------------------------------------------------

CONFIG = """
[model]
layers = 1
width = 16
heads = 2
vocab = 256

[data]
corpus = "{corpus}"
seq_len = 16
micro_batch_size = 2
global_batch_size = 4

[run]
dir = "{run}"
steps = 3
eval_every = 2
eval_batches = 1
save_every = 0
threads = 1
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "text.txt").write_text("the horse carries the pack up the hill and down again. " * 200)
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(corpus=tmp_path / "text.txt", run=tmp_path / "run"))
    return path


def command(monkeypatch, capsys, *words) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["packhorse", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    seen = capsys.readouterr()
    return int(ended.value.code or 0), seen.out, seen.err


@pytest.mark.parametrize(
    "settings, said",
    [
        (["memory.budget=1000"], r"the budget of 1000 B \(1000 bytes\) is too small: with recompute='auto' the least that works"),
        (['memory.budget="101%"'], r"cannot read the budget '101%'"),
        (["memory.budget=true"], r"memory\.budget"),
        (['memory.budget="40 pounds"'], r"cannot read the budget '40 pounds'"),
        (['memory.recompute="sqr"'], r"memory\.recompute.*sqrt"),
        (['memory.recompute="milp"'], r"nodes, expected 60 at most"),
    ],
)
def test_the_command_says_it_in_one_paragraph_with_exit_code_2(config, monkeypatch, capsys, settings, said):
    words = [word for setting in settings for word in ("--set", setting)]
    code, _, err = command(monkeypatch, capsys, "train", config, *words)
    assert code == 2 and re.search(said, err) and err.startswith("packhorse: ") and err.count("\n") == 1 and "Traceback" not in err
    assert not (config.parent / "run" / "checkpoints").exists()


def test_train_and_explain_honour_recompute_and_budget(config, monkeypatch, capsys):
    config.write_text(config.read_text().replace("layers = 1", "layers = 2"))
    losses = {}
    runs = [("none", None, "graph", ""), ("recursive", '"minimum"', "program", ".mirror1."), ("optimal", '"85%"', "graph", "# recompute")]
    for method, budget, stage, word in runs:
        words = ["--set", f'memory.recompute="{method}"', "--set", f'run.dir="{config.parent / method}"']
        words += ["--set", f"memory.budget={budget}"] if budget else []
        code, _, _ = command(monkeypatch, capsys, "train", config, "--json", *words)
        assert code == 0
        losses[method] = re.findall(r'"loss": ([\d.]+)', (config.parent / method / "metrics.jsonl").read_text())
        code, out, _ = command(monkeypatch, capsys, "explain", config.parent / method, "--stage", stage)
        assert code == 0 and word in out and (method == "none") == ("recompute" not in out and ".mirror" not in out)
    code, out, _ = command(monkeypatch, capsys, "explain", config.parent / "optimal", "--stage", "plan")
    assert code == 0 and ".mirror1." in out
    assert losses["none"] and losses["none"] == losses["recursive"] == losses["optimal"]
