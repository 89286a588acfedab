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


def test_the_line_of_a_program_in_nanoseconds(parked):
    """One second a call, two a copy, one the gather: the computation waits from 5 to 6, 7 to 9 and 9 to 10."""
    data = page_data(parked())
    (program,) = data["programs"]
    line, second = program["line"], 10**9
    assert data["streams"] == ["to host", "from host", "tp"] and data["host"] == 32768
    assert line["positions"] == [s * second for s in (0, 1, 2, 2, 3, 4, 4, 4, 5, 6, 7, 7, 9, 9, 10, 10, 10, 11, 11, 12, 12, 13, 13, 14)]
    events = list(zip(*(line[key] for key in ("stream", "name", "node", "begin", "end", "bytes"))))
    assert events == [
        (0, "to host g", 6, 4 * second, 6 * second, 32768),
        (1, "from host g", 10, 7 * second, 9 * second, 32768),
        (2, "gather h", 12, 9 * second, 10 * second, 16384),
    ]
    pool = program["pool"]
    assert (pool["name"], pool["lower"], pool["upper"], pool["offset"]) == ([".host.g"], [6], [12], [0])
    assert data["kinds"][pool["kind"][0]] == "on the host" and set(program["stays"]["kind"]).isdisjoint(pool["kind"])


def test_a_program_without_calls_has_a_line_too(by_hand):
    assert page_data(by_hand(next='graph next\ninput %x: f32[2] = batch "x"\n'))["programs"][1]["line"]["positions"] == [0, 0]
