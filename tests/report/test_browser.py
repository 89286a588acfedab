"""The page in a real browser: what its script draws and says, against values worked out by hand. Skipped where there is no chromium."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections import Counter
from importlib.resources import files

import pytest

from packhorse.report.page import page

pytestmark = pytest.mark.pure

# Points at a grid of places in each picture, presses keys, and leaves what it finds in the document. Runs after the page's own script.
PROBE = """
setTimeout(() => {
  const tip = document.getElementById("tip");
  const seen = (id) => {
    const canvas = document.querySelector(`#${id} canvas`), box = canvas.getBoundingClientRect();
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const found = [];
    const texts = {};
    for (let x = 5; x < box.width; x += STEP)
      for (let y = 1; y < box.height; y += 5) {
        canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + x, clientY: box.top + y }));
        const name = tip.hidden ? null : tip.querySelector("b")?.textContent;
        if (!name) continue;
        texts[name] ??= tip.innerText;
        const at = 4 * (Math.floor(y) * canvas.width + Math.floor(x));
        found.push([name, pixels.slice(at, at + 3).join()]);
      }
    canvas.dispatchEvent(new PointerEvent("pointerleave"));
    return { found, texts };
  };
  const found = { offsets: seen("offsets"), bytes: seen("bytes"), left: tip.hidden, keys: [] };
  for (const id of ["pool", "line"]) if (document.getElementById(id)) found[id] = seen(id);
  const canvas = document.querySelector("#bytes canvas");
  for (const key of ["ArrowDown", "ArrowLeft", "+", "0", "Escape"]) {
    canvas.dispatchEvent(new KeyboardEvent("keydown", { key }));
    found.keys.push([tip.hidden ? "" : tip.innerText, document.getElementById("view").textContent]);
  }
  const peak = document.getElementById("bands-peak");
  Object.assign(found, { peak: peak.dataset.bytes, peakText: peak.textContent, title: document.title, images: document.images.length });
  const pre = document.body.appendChild(document.createElement("pre"));
  pre.id = "found";
  pre.textContent = btoa(unescape(encodeURIComponent(JSON.stringify(found))));
}, 50);
"""


@pytest.fixture
def browse(tmp_path):
    """(page, script) -> the document after the script, and what the browser's console said."""
    chromium = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
    if chromium is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")

    def run(text, script):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        text = text.replace("script-src ", f"script-src 'sha256-{digest}' ", 1).replace("</body>", f"<script>{script}</script></body>")
        file = tmp_path / "page.html"
        file.write_text(text, encoding="utf-8")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"]
        flags += ["--window-size=1280,1800", "--virtual-time-budget=4000", "--dump-dom"]
        done = subprocess.run([chromium, *flags, file.as_uri()], capture_output=True, text=True, timeout=120)
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return run


def found_in(dom):
    return json.loads(base64.b64decode(re.search(r'<pre id="found">([^<]+)', dom)[1]))


def colour(name):
    """The light scheme's colour of a kind, as the pixel that a canvas has of it."""
    value = re.search(rf"--{name}: #(\w{{6}})", files("packhorse.report").joinpath("page.css").read_text())[1]
    return ",".join(str(int(value[i : i + 2], 16)) for i in (0, 2, 4))


# name -> times that it lives x bytes; see conftest.py
ARENA = {
    "%h1": 2 * 32768,
    "%g1": 2 * 32768,
    "%h2": 3 * 8192,
    "%d2": 7 * 8192,
    "%.mirror1.h1": 7 * 32768,
    "%.mirror1.g1": 3 * 32768,
    "%dg": 2 * 32768,
    "%dh": 3 * 32768,
}
KINDS = dict.fromkeys(ARENA, "temporary") | {"%h2": "kept", "%.mirror1.h1": "recomputed", "%.mirror1.g1": "recomputed"}


def test_pictures_tooltips_and_keys(by_hand, evil, browse):
    dom, console = browse(page(by_hand(budget="50%"), "a step"), PROBE.replace("STEP", "30"))
    assert console == []
    found = found_in(dom)
    assert (found["title"], found["images"]) == ("a step", 0)

    # the highest point of the bands: persistent 98304, and at time 11 three storages of 32768
    assert (found["peak"], found["peakText"]) == (str(98304 + 3 * 32768), "192.000 KiB in first, time 11")

    # in both pictures the area over which a tensor is named is as large as it lives long and is large
    persistent = {"parameters": 14 * 49152, "gradients": 14 * 49152}
    for picture, areas in (("offsets", ARENA), ("bytes", ARENA | persistent | {"%e": 2 * 8192})):
        counts = Counter(name for name, _ in found[picture]["found"])
        assert set(counts) == set(areas)
        unit = sum(counts.values()) / sum(areas.values())
        for name, area in areas.items():
            assert counts[name] == pytest.approx(area * unit, rel=0.3), (picture, name)

    # kept, recomputed and temporary by colour
    for name, kind in KINDS.items():
        pixels = Counter(pixel for n, pixel in found["offsets"]["found"] if n == name)
        assert pixels.most_common(1)[0][0] == colour(kind), name

    # a tooltip names tensor, bytes, kind, module, line, operator, times and offset
    texts = {name: text.splitlines() for name, text in found["offsets"]["texts"].items()}
    assert texts["%.mirror1.h1"][0].split() == ["%.mirror1.h1", "32.000", "KiB"]
    assert texts["%.mirror1.h1"][1:5] == ["recomputed, copy 1 of 1", "module blocks.0.up", "model.py:3", "recompute aten.mm.default"]
    assert texts["%.mirror1.h1"][5].startswith("times 5 to 11, offset ")
    assert texts["%g1"][1:3] == ["temporary; made again once", f"module {evil}"]
    external = found["bytes"]["texts"]["%e"].splitlines()
    assert external[1:3] == ["kept from forward to backward", "outermost module"] and external[5] == "times 3 to 4, allocated by its kernel"

    # keys: the second largest tensor at the peak; one call earlier; enlarged; the whole step again; away
    (second, _), (earlier, _), (_, part), (_, whole), (gone, _) = found["keys"]
    assert second.startswith("%dg") and "time 11 of 14" in second and "alive: 192.000 KiB" in second
    assert "time 10 of 14" in earlier and part.startswith("first ") and (whole, gone) == ("", "") and found["left"]


def test_programs_stand_side_by_side_even_those_of_one_call(by_hand, browse):
    update = """graph update
input %g: f32[64, 128] = grad "w1"
%s: f32[64, 128] = aten.gelu.default(%g)  # update |  | o.py:1
%u: f32[64, 128] = aten.gelu.default(%s)  # update |  | o.py:1
output %u = param "w1"
"""
    dom, console = browse(page(by_hand(update=update), "a step"), PROBE.replace("STEP", "120"))
    found = found_in(dom)
    assert console == [] and {"%s", "%h1"} <= set(found["offsets"]["texts"])


def test_what_waits_elsewhere_and_what_runs_beside_the_computation(parked, browse):
    """Of 14 seconds the copy to the host has 4 to 6, the copy back 7 to 9, the gather 9 to 10; %.host.g lies in the pool from 6 to 12 of 23 calls."""
    plan = parked()
    dom, console = browse(page(plan, "a step"), PROBE.replace("STEP", "60"))
    assert console == []
    found = found_in(dom)
    streams = {"to host g": (4, 6, "to-host"), "from host g": (7, 9, "from-host"), "gather h": (9, 10, "tp")}
    assert set(found["line"]["texts"]) == set(streams)
    for name, (begin, end, stream) in streams.items():
        lines = found["line"]["texts"][name].splitlines()
        assert f"{stream.replace('-', ' ')}: {end - begin} s, from {begin} s to {end} s of first" in lines
        pixels = Counter(pixel for n, pixel in found["line"]["found"] if n == name)
        assert pixels.most_common(1)[0][0] == colour(stream), name
    assert "started by forward packhorse.to_host.default down m.py:3, time 6" in found["line"]["texts"]["to host g"].splitlines()
    assert found["line"]["texts"]["gather h"].splitlines()[0].split() == ["gather", "h", "16.000", "KiB"]

    text = found["pool"]["texts"]["%.host.g"].splitlines()
    assert text[1] == "saved value on the host" and text[-3] == "times 6 to 11, offset 0 B of the host's pool"
    assert set(found["pool"]["texts"]) == {"%.host.g"} and text[-1].endswith("; on the host: 32.000 KiB")
    kinds = {"%.slice.h": "slice", "%g": "leaving", "%.whole.h": "back", "%k": "kept"}
    for name, kind in kinds.items():
        pixels = Counter(pixel for n, pixel in found["offsets"]["found"] if n == name)
        assert pixels.most_common(1)[0][0] == colour(kind), name
    assert found["offsets"]["texts"]["%.slice.h"].splitlines()[1] == "slice of a saved value, this rank's part"


def test_the_time_line_shows_the_stretch_that_the_others_show(parked, browse):
    """5.9 to 10.9 seconds: from the wait of call 8 to the product of call 16."""
    drag = """setTimeout(() => {
      const canvas = document.querySelector("#line canvas"), box = canvas.getBoundingClientRect();
      const at = (second) => ({ clientX: box.left + 62 + (second / 14) * (box.width - 76), clientY: box.top + 40 });
      const moves = [["pointerdown", 5.9], ["pointermove", 8], ["pointerup", 10.9]];
      for (const [kind, second] of moves) canvas.dispatchEvent(new PointerEvent(kind, at(second)));
      const pre = document.body.appendChild(document.createElement("pre"));
      pre.id = "found";
      pre.textContent = btoa(JSON.stringify(document.getElementById("view").textContent));
    }, 50);"""
    dom, console = browse(page(parked(), "a step"), drag)
    assert console == [] and found_in(dom) == "first 8 to 16"


def test_an_error_on_the_page_would_be_seen(by_hand, browse):
    _, console = browse(page(by_hand(), "a step"), "missing.function();")
    assert len(console) == 1 and "missing is not defined" in console[0]
    _, console = browse(page(by_hand(), "a step").replace("script-src 'sha256-", "script-src 'sha256-x"), "1;")
    assert any("Content Security Policy" in line for line in console)
