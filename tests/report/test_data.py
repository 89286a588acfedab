import json

import pytest

from packhorse.report.data import page_data, script_safe

pytestmark = pytest.mark.pure


def test_columns_say_the_graph(by_hand):
    data = page_data(by_hand(budget="50%"))
    (program,) = data["programs"]
    assert (program["name"], program["end"], program["repeats"], data["budget"]) == ("first", 14, 1, 200_000)  # half of keep_everything_bytes
    words, nodes, stays = data["words"], program["nodes"], program["stays"]
    assert [words[i] for i in nodes["op"]][:4] == ["aten.mm.default", "aten.gelu.default", "aten.mm.default", "aten.flip.default"]
    assert [words[i] for i in nodes["phase"]] == ["forward"] * 4 + ["backward"] + ["recompute"] * 3 + ["backward"] * 6
    rows = {name: (again, copy, offset) for name, again, copy, offset in zip(*(stays[key] for key in ("name", "again", "copy", "offset")))}
    assert rows["h1"][:2] == (1, 0) and rows[".mirror1.h1"][:2] == (1, 1) and rows["dg"][:2] == (0, 0)
    assert rows["e"][2] == -1 and min(offset for name, (_, _, offset) in rows.items() if name != "e") == 0


def test_later_micro_batches_are_one_program_that_repeats(by_hand):
    from dataclasses import replace

    text = 'graph next\ninput %x: f32[2] = batch "x"\n'
    plan = by_hand(next=text)
    plan = replace(plan, options=replace(plan.options, num_micro_batches=4))
    assert [(p["name"], p["repeats"], p["end"]) for p in page_data(plan)["programs"]] == [("first", 1, 14), ("next", 3, 1)]


def test_no_budget_and_the_least_are_no_line_in_the_picture(by_hand):
    assert page_data(by_hand())["budget"] is None and page_data(by_hand(budget="minimum"))["budget"] is None


def test_nothing_ends_the_script_that_holds_the_data():
    evil = ["</script><script>", "<!--", "]]>", "&lt;", "\u2028", "ü"]
    text = script_safe(evil)
    assert not set("<>&\u2028") & set(text) and json.loads(text) == evil
