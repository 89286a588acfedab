"""Two network namespaces as two hosts, each with a torchrun of its own, and a virtual cable between them. test_two_hosts.py runs it:

unshare --user --map-root-user --net python two_hosts.py OUT.json      is one host, and makes the other
python two_hosts.py rank OUT.json                                      is what torchrun starts on each

Everything goes with the processes: no namespace has a name, and none outlives its last process.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ADDRESSES = ("10.9.0.1", "10.9.0.2")
CABLE = ("host0", "host1")  # interfaces, one in each namespace
NUM_STEPS = 4


def main(out: Path) -> None:
    """Each rank writes what it says of every stage, as OUT.0.json and OUT.1.json."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    other = subprocess.Popen(["unshare", "--net", "sleep", "300"])
    try:
        inside = ["nsenter", "--target", str(other.pid), "--net"]
        own = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{other.pid}/ns/net") == own:
            time.sleep(0.01)
        subprocess.run(["ip", "link", "add", CABLE[0], "type", "veth", "peer", "name", CABLE[1], "netns", str(other.pid)], check=True)
        for enter, name, address in zip(([], inside), CABLE, ADDRESSES):
            subprocess.run([*enter, "ip", "address", "add", f"{address}/24", "dev", name], check=True)
            subprocess.run([*enter, "ip", "link", "set", name, "mtu", "9000", "up"], check=True)  # headers are then less than one part in 100
            subprocess.run([*enter, "ip", "link", "set", "lo", "up"], check=True)
        hosts = [
            subprocess.Popen([*enter, *torchrun(node, out)], env=os.environ | {"GLOO_SOCKET_IFNAME": CABLE[node]})
            for node, enter in enumerate(([], inside))
        ]
        codes = [host.wait() for host in hosts]
    finally:
        other.kill()
    assert codes == [0, 0], codes


def torchrun(node: int, out: Path) -> list[str]:
    """As on a real machine, where the last two are seldom needed: both hosts here have the same name."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node)),
        *("--rdzv-backend", "c10d", "--rdzv-id", "two-hosts", "--rdzv-endpoint", f"{ADDRESSES[0]}:29400"),
        *("--rdzv-conf", f"is_host={str(node == 0).lower()}", "--local-addr", ADDRESSES[node]),
        *(__file__, "rank", str(out)),
    ]


def rank(out: Path) -> None:
    """Trains at every stage over the cable, and counts what goes through it."""
    import torch

    import packhorse as ph
    from packhorse.models.gpt import gpt
    from packhorse.models.sizes import Size

    torch.set_num_threads(1)
    found = {}
    for stage in range(4):
        torch.manual_seed(0)
        model = gpt(Size(layers=2, width=256, heads=4, vocab=256, seq_len=16))
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.randint(256, (2, 2, 16), generator=torch.Generator().manual_seed(int(os.environ["RANK"])))
        batches = [{"ids": part, "labels": part} for part in ids]
        plan = ph.plan(model, batches, optimizer=optimizer, num_micro_batches=2, clip_norm=1.0, mesh=ph.Mesh(dp=2), zero_stage=stage)
        step = ph.compile(model, plan)
        step(batches)
        step.ranks.texts("so far", "first step")  # two rounds: what was sent before the first has arrived
        before = sent()
        losses = [step(batches).item() for _ in range(NUM_STEPS)]
        step.ranks.texts("done", "end of steps")
        ledger = step.ledger()
        found[stage] = {
            "planned": plan.comm_bytes,
            "counted": ledger.measured_comm_bytes,
            "through the cable": (sent() - before) / NUM_STEPS,
            "losses": losses,
        }
    found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    out.with_suffix(f".{os.environ['RANK']}.json").write_text(json.dumps(found))


def sent() -> int:
    """Bytes that this host has put on the cable, headers and acknowledgements included."""
    name = os.environ["GLOO_SOCKET_IFNAME"]
    (shown,) = json.loads(subprocess.run(["ip", "-s", "-j", "link", "show", name], check=True, capture_output=True, text=True).stdout)
    return shown["stats64"]["tx"]["bytes"]


if __name__ == "__main__":
    rank(Path(sys.argv[2])) if sys.argv[1] == "rank" else main(Path(sys.argv[1]))
