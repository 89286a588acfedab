"""`packhorse bench overlap`: what it brings that communication runs beside the computation.

Two ranks at stage 3 in a network namespace of their own, whose link is throttled (tc tbf) so that communication takes about as long as computing. The
same program runs as it is, and with every wait right behind its start; steps alternate, medians are compared.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from typing import Any

from packhorse.bench.jobs import run_job
from packhorse.errors import UserError

JOB, RANKS, BAR = "packhorse.bench.overlap_job", 2, 0.65
_INSIDE = "PACKHORSE_OVERLAP"  # the module runs itself again in the namespace


def measure(rounds: int, shape: dict[str, int]) -> dict[str, Any]:
    """Inside a namespace: figures of the link as it is, then throttled."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    free = run_job(JOB, {"rounds": rounds, **shape}, RANKS, seconds=300)
    # both ranks send through the one link
    rate = int(RANKS * free["comm_bytes"] / free["together_s"])
    subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", f"{rate}bps", "burst", "256kb", "latency", "2s"], check=True)
    slow = run_job(JOB, {"rounds": rounds, **shape}, RANKS, seconds=900)
    return {
        "rate_bytes_per_s": rate,
        "comm_bytes": free["comm_bytes"],
        "compute_s": free["together_s"],
        "apart_s": slow["apart_s"],
        "together_s": slow["together_s"],
        "ratio": slow["together_s"] / slow["apart_s"],
    }


def run(arguments: list[str], *, as_json: bool) -> int:
    """The command. Exit code 1 if the ratio is above the bar. Raises UserError where namespaces or tc are missing."""
    parser = argparse.ArgumentParser(prog="packhorse bench overlap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="steps of each kind")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--samples", type=int, default=4, help="of 128 tokens a rank")
    asked = parser.parse_args(arguments)
    if asked.rounds < 1:
        raise UserError(f"bench overlap: --rounds {asked.rounds}: expected 1 or more")
    if os.environ.get(_INSIDE) != "1":
        return _again_inside(arguments, as_json)
    found = measure(asked.rounds, {"layers": asked.layers, "width": asked.width, "samples": asked.samples})
    if as_json:
        print(json.dumps(found))
    else:
        print(
            f"computing {found['compute_s']:.2f} s a step, {found['comm_bytes']:,} bytes sent by each rank over a link of "
            f"{found['rate_bytes_per_s']:,} bytes/s: every wait behind its start {found['apart_s']:.2f} s, overlapped {found['together_s']:.2f} s: "
            f"{found['ratio']:.3f} (bar {BAR})"
        )
    return int(found["ratio"] > BAR)


def _again_inside(arguments: list[str], as_json: bool) -> int:
    missing = [name for name in ("unshare", "ip", "tc") if shutil.which(name) is None]
    namespace = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--net"]
    if missing or subprocess.run([*namespace, "true"], capture_output=True).returncode:
        raise UserError(
            f"bench overlap needs a network namespace of its own with a throttled link, and "
            f"{'cannot find ' + ', '.join(missing) if missing else 'may not make one'}"
            " here; run it on Linux, as root or where user namespaces are allowed, with iproute2 installed"
        )
    words = ["bench", "overlap", *(["--json"] if as_json else []), *arguments]
    return subprocess.run([*namespace, sys.executable, "-m", "packhorse", *words], env=os.environ | {_INSIDE: "1"}).returncode
