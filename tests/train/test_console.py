import io
import json

import pytest

from packhorse.train.console import Console, step_fields

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
    assert out.getvalue() == (
        "step    7/1000  loss 2.3457  grad 1.250->1.000  lr 3.00e-04  tokens/s   12346  MFU 43.2%  memory 1.500 GiB  ETA 1:02:05\n"
    )


def test_what_is_not_known_is_not_guessed():
    out = io.StringIO()
    unknown = RECORD | {"tokens_per_s": None, "mfu": None, "memory_bytes": None, "grad_norm": None, "clipped_norm": None}
    Console(out).fields(step_fields(unknown, steps=1000, eta_s=None))
    assert out.getvalue() == ("step    7/1000  loss 2.3457  grad -             lr 3.00e-04  tokens/s       -  MFU N/A  memory -  ETA -\n")


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


@pytest.mark.parametrize(("norm", "clipped", "text"), [(1.25, 1.25, "1.250"), (0.0, 0.0, "0.000"), (12.5, 1.0, "12.500->1.000")])
def test_whether_the_gradient_was_clipped_is_seen(norm, clipped, text):
    assert dict(step_fields(RECORD | {"grad_norm": norm, "clipped_norm": clipped}, steps=10, eta_s=None))["grad"].rstrip() == text
