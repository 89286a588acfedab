import os
import signal
import subprocess
import sys
import textwrap

import pytest

from packhorse.train.stop import StopSignal

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_is_noted(number, code):
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert stop.received is None and stop.exit_code == 0
        os.kill(os.getpid(), number)
        assert stop.received == number and stop.exit_code == code
    assert signal.getsignal(number) == before


def test_a_second_interrupt_acts_at_once():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
    try:
        with StopSignal(), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_second_sigterm_ends_the_process():
    code = textwrap.dedent("""
        import signal
        from packhorse.train.stop import StopSignal
        with StopSignal():
            signal.raise_signal(signal.SIGTERM)
            print("still here", flush=True)
            signal.raise_signal(signal.SIGTERM)
            print("not here")
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "still here\n" and done.returncode == -signal.SIGTERM
    assert "stopping at the end of this step" in done.stderr


def test_a_rank_that_is_not_the_first_notes_it_in_silence(capfd):
    with StopSignal(says=False) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == signal.SIGTERM
    assert capfd.readouterr() == ("", "")
