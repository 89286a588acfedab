import json
import re
import signal
import sys
import time
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import packhorse
from packhorse.bench import frontier
from packhorse.bench.chains import WORKLOADS, Workload, gpt_chain, lstm_chain, resnet_chain, transformer
from packhorse.bench.frontier import Contestant, OutOfTime, Row, enter_rival, flops_of, kept_its_word, race, time_limit
from packhorse.bench.frontier_page import picture, render, sentences
from packhorse.bench.recompute_rivals import Rival, rivals
from packhorse.bench.replan import replanned
from packhorse.cli.benches import NAMES
from packhorse.errors import UserError

pytestmark = pytest.mark.cpu

LAYERS, WIDTH, HIDDEN, VOCAB, BATCH, TOKENS = 4, 16, 32, 32, 2, 16


def small(layers=LAYERS):
    torch.manual_seed(0)
    model = transformer(layers=layers, width=WIDTH, heads=2, hidden=HIDDEN, vocab=VOCAB, seq_len=TOKENS).train()
    return model, {name: torch.randint(0, VOCAB, (BATCH, TOKENS)) for name in ("inputs", "labels")}


def block_flops():
    """Forward flops of one block: (all, of its last product)."""
    tokens = BATCH * TOKENS
    products = [2 * tokens * WIDTH * 3 * WIDTH, 2 * tokens * WIDTH * WIDTH, 2 * 2 * tokens * WIDTH * HIDDEN, 2 * tokens * HIDDEN * WIDTH]
    attention = 4 * BATCH * TOKENS * TOKENS * WIDTH
    return sum(products), attention, products[-1]


@pytest.fixture(scope="module")
def entered():
    """name -> row of each rival by hand, eager first."""
    torch.set_num_threads(1)
    model, batch = small()
    found, reference = {}, None
    for rival in rivals(model, inductor=False, aot=False):
        contestant, reference = enter_rival(rival, model, batch, reference, 60)
        found[rival.name] = contestant.row
    return found


def test_eagers_flops_are_the_closed_form_and_the_plans():
    model, batch = small()
    products, attention, _ = block_flops()
    head = 2 * BATCH * TOKENS * WIDTH * VOCAB
    # a product's backward pass is two products of its size; attention's is the scores again and four products
    expected = LAYERS * (3 * products + attention * 7 // 2) + 3 * head
    assert flops_of(lambda: model(**batch).backward()) == expected
    plan = packhorse.plan(model, batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), recompute="none")
    assert plan.flops == expected


def test_rivals_recompute_what_their_names_say(entered):
    """Early stop leaves out a region's last product, and whatever is not in a region is not recomputed."""
    products, attention, last = block_flops()
    eager = LAYERS * (3 * products + attention * 7 // 2) + 3 * 2 * BATCH * TOKENS * WIDTH * VOCAB
    forward = products + attention
    extra = {
        "every block": LAYERS * (forward - last),
        "every 2 blocks": LAYERS * forward - 2 * last,
        "checkpoint_sequential, 2 segments": 2 * forward - last,
        "checkpoint_sequential, 4 segments": 3 * (forward - last),
        "first 3 of 4 blocks": 3 * (forward - last),
        "keep products and attention": 0,
        "keep attention": LAYERS * (products - last),
        # an outer region of three stops at its third block, whose input is the last that it has to give; one of one has nothing to do
        "nested 3 x 1": 2 * forward + LAYERS * (forward - last),
    }
    for name, flops in extra.items():
        assert entered[name].extra_flops == pytest.approx(flops / eager), name


def test_every_rival_by_hand_has_eagers_bits_and_less_memory(entered):
    ran = [row for row in entered.values() if not row.failure]
    assert {row.equal for row in ran} == {"yes"} and entered["eager"].over_eager == 1
    assert all(row.over_eager < 1 for row in ran if row.family != "eager")
    assert {row.family for row in ran} >= {"checkpoint every k", "checkpoint_sequential", "first m blocks", "nested", "selective policy"}
    assert [name for name in entered if name.startswith("checkpoint_sequential")] == [f"checkpoint_sequential, {s} segments" for s in (2, 3, 4)]


def test_a_missing_library_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_remat", None)
    model, batch = small(2)
    rival = next(r for r in rivals(model, inductor=False, aot=False) if r.family == "torch_remat")
    _, reference = enter_rival(rivals(model)[0], model, batch, None, 60)
    contestant, _ = enter_rival(rival, model, batch, reference, 60)
    assert contestant.step is None and "not installed: pip install torch-remat" in contestant.row.failure


def test_a_rival_that_fails_or_takes_too_long_is_a_line_and_not_the_end():
    model, batch = small(2)
    _, reference = enter_rival(rivals(model)[0], model, batch, None, 60)

    def endless(model):
        try:
            while True:
                time.sleep(0.01)
        except Exception:  # what a compiler does with errors inside it
            return model

    broken = enter_rival(Rival("f", "zero", lambda m: 1 / 0), model, batch, reference, 60)[0].row
    slow = enter_rival(Rival("f", "slow", endless), model, batch, reference, 0.2)[0].row
    assert broken.failure == "ZeroDivisionError: division by zero" and slow.failure == "not ready after 0.2 s"


def test_the_time_limit_gives_an_outer_alarm_back():
    handler = signal.getsignal(signal.SIGALRM)
    before = signal.setitimer(signal.ITIMER_REAL, 300)
    try:
        with pytest.raises(OutOfTime), time_limit(0.05):
            time.sleep(5)
        assert 290 < signal.getitimer(signal.ITIMER_REAL)[0] <= 300 and signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


def test_other_gradients_and_moved_buffers_are_seen():
    torch.manual_seed(0)
    model = resnet_chain(depth=8, width=4).train()
    batch = {"inputs": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 2])}
    found = {}
    reference = None
    for rival in [Rival("eager", "eager", lambda m: m), *(r for r in rivals(model) if r.name in ("every block", "keep products"))]:
        contestant, reference = enter_rival(rival, model, batch, reference, 60)
        found[rival.name] = contestant.row.equal
    # batch norm inside a region sees each batch twice: gradients are the same, running statistics are not
    assert found == {"eager": "yes", "every block": "buffers differ", "keep products": "buffers differ"}
    wrong = Rival("f", "w", lambda m: lambda **b: 2 * m(**b))
    assert enter_rival(wrong, model, batch, reference, 60)[0].row.equal == "no"


def test_chains_are_the_models_they_are_cut_from():
    """The GPT's own module, and torch's LSTM cells with a softmax a step, give the same loss."""
    from packhorse.models.gpt import GPT

    size = {"layers": 2, "width": 16, "heads": 2, "vocab": 32, "seq_len": 8}
    ids, labels = torch.randint(0, 32, (2, 8)), torch.randint(0, 32, (2, 8))
    torch.manual_seed(3)
    whole = GPT(**size)
    torch.manual_seed(3)
    assert torch.equal(gpt_chain(**size)(ids, labels), whole(ids, labels))
    chain = lstm_chain(steps=3, width=8, layers=2, vocab=32)
    cells, head, states, loss = chain.blocks[0].cells, chain.blocks[0].head, [(torch.zeros(2, 8), torch.zeros(2, 8))] * 2, 0
    for t in range(3):
        x = chain.first.tokens(ids[:, t])
        for layer in range(2):
            states[layer] = cells[layer](x, states[layer])
            x = states[layer][0]
        loss = loss + F.cross_entropy(head(x), labels[:, t]) / 3
    torch.testing.assert_close(chain(ids[:, :3], labels[:, :3]), loss)


def test_a_replanned_step_is_what_plan_gives():
    model, batch = small(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    none = packhorse.plan(model, batch, optimizer=optimizer, recompute="none")
    assert replanned(none, model, optimizer, "sqrt", None) == packhorse.plan(model, batch, optimizer=optimizer, recompute="sqrt")
    with pytest.raises(UserError):
        replanned(none, model, optimizer, "sqrt", none.persistent_bytes)


def test_a_round_runs_everyone_once():
    order = []
    contestants = [
        Contestant(Row("f", "a"), lambda: order.append("a")),
        Contestant(Row("f", "gone")),
        Contestant(Row("f", "b"), lambda: order.append("b")),
    ]
    times = race(contestants, 3)
    assert order == ["a", "b"] * 3 and [len(t) for t in times] == [3, 0, 3]


def test_the_whole_run(monkeypatch, capsys, tmp_path):
    """Ours within each rival's own peak, exact, with eager's bits; the page and the picture are written."""
    monkeypatch.setitem(WORKLOADS, "tiny", Workload("two blocks", lambda: small(2)[0], lambda: small(2)[1]))
    few = ("eager", "every block", "checkpoint_sequential, 2 segments")
    monkeypatch.setattr(frontier, "rivals", lambda model, **_: [r for r in rivals(model) if r.name in few])
    monkeypatch.setattr(frontier, "METHODS", ("blocks",))
    monkeypatch.setattr(frontier, "NUM_BUDGETS", 2)
    page, svg = tmp_path / "page.md", tmp_path / "p.svg"
    page.write_text(f"before\n{frontier.BEGIN}\nold\n{frontier.END}\nafter\n")
    words = ["--model", "tiny", "--quick", "--no-compile", "--rounds", "1", "--write", str(page), "--picture", str(svg)]
    assert frontier.run(words, as_json=True) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert all(row["exact"] and row["equal"] == "yes" and row["held"] is not False for row in rows.values() if row["ours"])
    theirs = [row for row in rows.values() if not row["ours"] and not row["failure"]]
    assert len(theirs) == 3 and all(row["time"] > 0 for row in theirs)
    assert all(row["at_peak_failure"] or row["at_peak_bytes"] <= row["peak_bytes"] for row in theirs)
    assert any(row["at_peak_ratio"] for row in theirs)
    assert "| every block |" in page.read_text() and "old" not in page.read_text() and page.read_text().startswith("before")
    assert svg.read_text().count("<title>") == 2 + 4  # two rivals; everything, the two budgets, the method


ROWS = [
    Row("eager", "eager", peak_bytes=1000, over_eager=1.0, time=1.0, equal="yes"),
    Row("first m blocks", "first 2 of 4 blocks", peak_bytes=500, over_eager=0.5, time=1.2, at_peak_bytes=490, at_peak_time=1.0, at_peak_ratio=0.8),
    Row("nested", "nested 2 x 1", peak_bytes=70, over_eager=0.07, time=1.6, at_peak_bytes=70, at_peak_time=2.0, at_peak_ratio=1.25),
    Row("activation_memory_budget, inductor", "inductor, budget 0.5, dp", share=0.5, peak_bytes=600, over_eager=0.6, time=0.9, held=False),
    Row("torch_remat", "torch_remat, every block", failure="not installed | pip"),
    Row("packhorse", "packhorse, none", ours=True, peak_bytes=800, over_eager=0.8, time=0.8, exact=True, equal="yes"),
    Row("packhorse optimal", "packhorse, optimal, the least", True, 60, 0.06, budget_bytes=99, held=True, exact=True, time=2.1, equal="yes"),
]  # fmt: skip


def test_what_the_tables_come_to():
    said = "\n".join(sentences(ROWS))
    assert "Within the peak of each of 3 rivals packhorse has a plan for 2, and is no slower in 1; the largest ratio of times is 1.250" in said
    assert "first 2 of 4 blocks (0.50 of eager's peak): +20.0% of eager's time; packhorse there +0.0% of eager's, +25.0% of its own" in said
    assert "kept the peak within its share in 0 of 1" in said and "packhorse kept its budget in 1 of 1" in said
    page = render(ROWS, "two blocks", 1, 3)
    assert "not installed \\| pip" in page and "Two blocks; 1 thread(s), median of 3" in page
    families = re.findall(r"^\| ([^|]+) \| [^|]+ \| \d+\.\d\d \| \d\.\d{3} \| \d\.\d{3} \|$", page, re.M)
    assert families == ["packhorse optimal", "nested", "first m blocks", "activation_memory_budget, inductor", "packhorse", "eager"]


def test_the_picture_is_points_alone():
    svg = picture(ROWS, "two blocks")
    assert 'class="line"' not in svg and svg.count("<title>") == 5 and "packhorse optimal" in svg


def test_a_broken_promise_is_a_failure():
    assert kept_its_word(ROWS)
    for broken in ({"held": False}, {"exact": False}, {"equal": "no"}):
        assert not kept_its_word([*ROWS[:-1], replace(ROWS[-1], **broken)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "0"], "--rounds 0"),
        (["--write", "nowhere.md"], "has no lines"),
        (["--picture", "no-such-folder/p.svg"], "there is no folder no-such-folder"),
        (["--cells", "resnt"], "no model is called resnt; the nearest are"),
    ],
)
def test_bad_words_are_said_before_the_work(words, message):
    with pytest.raises(UserError, match=re.escape(message)):
        frontier.run(words, as_json=True)


def test_it_is_among_the_benchmarks():
    assert "frontier" in NAMES
