"""Jobs of several ranks on this machine: a module of packhorse under torchrun, with a JSON object as its argument."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from packhorse.errors import UserError

LAST_WORDS = 2000  # characters of what a failed job has said


class JobError(UserError):
    """A job that did not come to its end: which, why, and its last words."""


def run_job(
    module: str, asked: dict[str, Any], num_ranks: int, *, seconds: float, environment: dict[str, str] | None = None, python: str = sys.executable
) -> Any:
    """Runs `python -m module JSON` on each of `num_ranks` ranks, one thread each; `asked` gets the key "out", a file into which rank 0 writes what is
    returned, as JSON.

    Raises JobError if the job fails, or takes longer than `seconds`: then it and all its processes are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), "-m", module]
        process = subprocess.Popen(
            [*command, json.dumps(asked | {"out": str(out)})],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise JobError(f"{module} on {num_ranks} ranks was killed after {seconds:.0f} s") from None
        finally:
            if process.poll() is None:
                _kill(process)
        if process.returncode or not out.is_file():
            ranks_own, _, launchers = said.rpartition("\nTraceback (most recent call last):")  # which comes after what the ranks have said
            words = (ranks_own or launchers)[-LAST_WORDS:].strip()
            raise JobError(f"{module} on {num_ranks} ranks ended with exit code {process.returncode}: {words}")
        return json.loads(out.read_text())


def end_job() -> NoReturn:
    """The end of one rank of a job that has told what it found: at once, when all ranks are here.

    What threads of torch do while an interpreter ends can make its exit code that of a failure ("terminate called without an active exception", seen
    once in some forty jobs).
    """
    import torch.distributed as dist

    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _kill(process: subprocess.Popen) -> None:
    """The launcher ends its ranks when it is told to end; what is left after that is killed."""
    process.terminate()
    try:
        process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
