import re

import pytest

from packhorse.errors import UserError
from packhorse.report.page import page, write_report

pytestmark = pytest.mark.pure


def test_the_tables_hold_the_figures(by_hand, reader):
    found = reader(page(by_hand(budget=200_000), "a step"))
    # at the peak instant: 48 KiB of parameters, as many of gradients, one mirror, two gradients of activations
    assert ["parameters", "48.000 KiB", "25.0%", "48.000 KiB"] in found.rows
    assert ["recomputed", "32.000 KiB", "16.7%", "64.000 KiB"] in found.rows
    assert ["kept from forward to backward", "0 B", "0.0%", "8.000 KiB"] in found.rows  # dead by then, but a colour in the picture
    assert ["alive at the peak instant", "192.000 KiB", "", ""] in found.rows
    assert ["%dg", "32.000 KiB", "temporary", "blocks.0.down", "model.py:5", "backward aten.mm.default"] in found.rows
    assert ["blocks.*.up", "aten.mm.default", "model.py:3", "1", "1", "32.000 KiB", "1.049e+06", "1000.000"] in found.rows
    assert ["all", "", "", "2", "2", "64.000 KiB", "1.049e+06", "2000.000"] in found.rows
    assert ["first", "14", "1", "96.000 KiB", "96.000 KiB", "0 B", "8.000 KiB"] in found.rows


def test_the_header_adds_up(by_hand):
    text = re.sub(r"<[^>]+>", " ", page(by_hand(budget=210_000), "a step"))
    text = " ".join(text.split())
    assert "200.000 KiB peak = 96.000 KiB persistent + 96.000 KiB arena + 8.000 KiB external" in text
    assert "Budget 205.078 KiB" in text and "Peak if everything is kept 390.625 KiB" in text and "Method of recomputation blocks" in text
    assert "Recomputed flops 1.049e+06 of" in text and "Predicted step on bench 11 s" in text and "of which recomputation 2 s" in text
    assert (
        "time 11 ( backward aten.gelu_backward.default in" in text.replace("(backward", "( backward") and "The peak is 8.000 KiB above that" in text
    )


def test_names_from_the_user_are_text_and_nothing_is_fetched(by_hand, reader):
    found = reader(page(by_hand(), "</title><script>alert(2)</script>"))
    tags = found.tags()
    assert tags.count("script") == 2 and not {"img", "iframe", "link", "object", "embed", "base", "form"} & set(tags)
    for tag, attributes in found.elements:
        assert not {"src", "href", "action"} & set(attributes), tag
        assert not any(name.startswith("on") for name in attributes), tag
    (policy,) = [a["content"] for t, a in found.elements if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and re.search(r"script-src 'sha256-[\w+/=]{44}'", policy)
    assert "url(" not in page(by_hand(), "a step") and "@import" not in page(by_hand(), "a step")


def test_a_plan_that_makes_nothing_again_says_so(by_hand):
    text = 'graph first\ninput %x: f32[2] = batch "x"\ninput %w1: f32[2] = param "w1"\ninput %w2: f32[2] = param "w2"\n'
    shown = page(by_hand(text=text), "a step")
    assert "everything that the backward pass needs is kept" in shown and "only persistent storage is alive" in shown


def test_a_thousand_nodes_are_less_than_half_a_megabyte(by_hand):
    lines = [
        'graph first\ninput %w1: f32[16, 16] = param "w1"\ninput %w2: f32[2] = param "w2"',
        "%v0: f32[16, 16] = aten.gelu.default(%w1)  # forward | a | m.py:1",
    ]
    for i in range(1, 1000):
        lines.append(f"%v{i}: f32[16, 16] = aten.gelu.default(%v{i - 1})  # forward | encoder.layers.{i}.feed_forward.activation | model.py:{i}")
    plan = by_hand(text="\n".join(lines))
    assert len(page(plan, "a step").encode()) < 500_000


def test_a_page_is_replaced_when_the_new_one_is_whole(by_hand, tmp_path):
    target = tmp_path / "report.html"
    target.write_text("old")
    assert write_report(by_hand(), target, title="a step") == target
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>") and [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_where_it_cannot_be_written(by_hand, tmp_path):
    with pytest.raises(UserError, match=r"there is no folder .*nowhere; make it first"):
        write_report(by_hand(), tmp_path / "nowhere" / "a.html")
    with pytest.raises(UserError, match=r"it is a folder; give the name of a file with --out, for example .*report.html"):
        write_report(by_hand(), tmp_path)
    with pytest.raises(UserError, match="File name too long; give another file"):
        write_report(by_hand(), tmp_path / ("a" * 250 + ".html"))
