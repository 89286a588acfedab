import socket

import pytest

from packhorse.cli import network
from packhorse.cli.network import addresses, describe_network

pytestmark = pytest.mark.pure
RANKS = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_the_loopback_is_known():
    assert addresses()["lo"] == "127.0.0.1" and set(addresses()) == {name for _, name in socket.if_nameindex()}


def test_a_process_without_a_launcher():
    facts = describe_network({})
    assert facts["world size"] == "1, no launcher" and facts["ranks meet at"] == "nowhere, no launcher" and facts["warnings"] == "none"


def test_a_rank():
    facts = describe_network(RANKS | {"GLOO_SOCKET_IFNAME": "lo"})
    assert (facts["world size"], facts["rank"]) == ("4", "3 (1 of 2 on this machine)")
    assert facts["ranks meet at"] == "127.0.0.1:29500" and facts["gloo would use"] == "lo 127.0.0.1 (GLOO_SOCKET_IFNAME)"
    assert facts["warnings"] == "none"


@pytest.mark.parametrize(
    ("changed", "warning"),
    [
        ({"MASTER_ADDR": "no-such-host.invalid"}, "MASTER_ADDR=no-such-host.invalid does not resolve"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR=not set, MASTER_PORT=29500: ranks do not know where to meet"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT=x"),
        ({"RANK": "4"}, "does not say which rank this process is: RANK=4, WORLD_SIZE=4"),
        ({"GLOO_SOCKET_IFNAME": "lo,eth77"}, "GLOO_SOCKET_IFNAME=lo,eth77: there is no interface eth77 here, there are lo"),
    ],
)
def test_what_cannot_work_is_said(changed, warning):
    facts = describe_network(RANKS | {"GLOO_SOCKET_IFNAME": "lo"} | changed)
    assert warning in facts["warnings"]


@pytest.mark.parametrize("local", [2, 4])
def test_a_host_name_that_is_the_loopbacks_is_no_use_to_other_machines(monkeypatch, local):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr(network, "_resolved", lambda host: ["127.0.0.1"])
    facts = describe_network(RANKS | {"LOCAL_WORLD_SIZE": str(local)})
    assert facts["gloo would use"].startswith("lo 127.0.0.1 (the host name localhost resolves to it)")
    assert ("set GLOO_SOCKET_IFNAME to the interface" in facts["warnings"]) == (local == 2)

