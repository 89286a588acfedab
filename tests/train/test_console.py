import io
import json
import re

import pytest

from packhorse.train.console import Console, eval_fields, step_fields

pytestmark = pytest.mark.pure

RECORD = {
    "step": 7,
    "loss": 2.34567,
    "grad_norm": 1.25,
    "clipped_norm": 1.0,
    "lr": 3e-4,
    "tokens_per_s": 12345.6,
    "mfu": 0.4321,
    "memory_bytes": 3 * 2**29,
}


def test_a_log_line():
    out = io.StringIO()
    Console(out).fields(step_fields(RECORD, steps=1000, eta_s=3725))
    assert out.getvalue() == ("step    7/1000  loss 2.3457  grad 1.25->1    lr 3.0e-4  tok/s 12346  ETA 1:02:05  memory 1.500 GiB  MFU 43.2%\n")


def test_what_is_not_known_is_not_guessed():
    out = io.StringIO()
    unknown = RECORD | {"tokens_per_s": None, "mfu": None, "memory_bytes": None, "grad_norm": None, "clipped_norm": None}
    Console(out).fields(step_fields(unknown, steps=1000, eta_s=None))
    assert out.getvalue() == "step    7/1000  loss 2.3457  grad -          lr 3.0e-4  tok/s     -  ETA     -\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("columns", "last"), [(120, "MFU 43.2%"), (100, "memory 1.500 GiB"), (80, "ETA 1:02:05"), (30, "loss 2.3457"), (5, "step    7/1000")]
)
def test_a_narrow_terminal_gets_one_line_without_what_does_not_fit(monkeypatch, columns, last):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    Console(out).fields(step_fields(RECORD, steps=1000, eta_s=3725))
    line = re.sub("\x1b[^m]*m", "", out.getvalue())
    assert line.rstrip().endswith(last) and line.count("\n") == 1 and (len(line.rstrip()) <= columns or columns == 5)


def test_text_is_printed_as_it_is_and_long_lines_are_not_broken():
    out = io.StringIO()
    Console(out).say("[run]\n" + "x" * 300)
    assert out.getvalue() == "[run]\n" + "x" * 300 + "\n"


def test_json_goes_to_the_stream_and_text_to_stderr(capsys):
    out = io.StringIO()
    console = Console(out, as_json=True)
    console.say("skipped step-3")
    console.record({"loss": 0.1 + 0.2})
    assert json.loads(out.getvalue()) == {"loss": 0.1 + 0.2} and "skipped step-3" in capsys.readouterr().err


@pytest.mark.parametrize(("norm", "clipped", "text"), [(1.25, 1.25, "1.25"), (0.0, 0.0, "0"), (12.5, 0.5, "12.5->0.5")])
def test_whether_the_gradient_was_clipped_is_seen(norm, clipped, text):
    assert dict(step_fields(RECORD | {"grad_norm": norm, "clipped_norm": clipped}, steps=10, eta_s=None))["grad"].rstrip() == text


@pytest.mark.parametrize("unit", ["byte", "token"])
def test_the_line_of_an_evaluation(unit):
    out = io.StringIO()
    Console(out).fields(eval_fields({"step": 7, "loss": 2.34567, "unit": unit}, steps=10))
    assert out.getvalue() == f"step  7/10  validation loss 2.3457 nats/{unit}\n"


def test_a_bar_is_for_terminals_and_gone_at_its_end(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for out in (Terminal(), io.StringIO()):
        with Console(out).progress("tokenizing", 4 * 10**6) as advance:
            advance(10**6)
            advance(3 * 10**6)
        assert ("tokenizing" in out.getvalue() and "4.0/4.0 MB" in out.getvalue()) == out.isatty()
        assert out.isatty() or out.getvalue() == ""
