"""Facts about this process's place in a job of several ranks, and about the network that they would talk over. No torch."""

import os
import socket
import struct
from collections.abc import Mapping

from packhorse.errors import ConfigError
from packhorse.train.launched import launched

_SIOCGIFADDR = 0x8915  # ioctl of Linux: the IPv4 address of an interface


def describe_network(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """World size, rank, the address where ranks meet, interfaces, the one that gloo would use, and what is wrong with them; "none" if nothing is."""
    warnings = []
    facts = {"world size": environment.get("WORLD_SIZE", "1, no launcher"), "rank": environment.get("RANK", "none")}
    local, several_machines = "", False
    try:
        here = launched(environment)
        several_machines = here.num_ranks > here.local_num_ranks
        local = f" ({here.local_rank} of {here.local_num_ranks} on this machine)" if here.num_ranks > 1 else ""
    except ConfigError as error:
        warnings.append(str(error))
    facts["rank"] += local
    facts["ranks meet at"], wrong = _meeting(environment)
    warnings += wrong
    interfaces = addresses()
    facts["interfaces"] = ", ".join(f"{name} {address}".strip() for name, address in interfaces.items()) or "unknown"
    facts["gloo would use"], wrong = _of_gloo(environment, interfaces, several_machines)
    facts["warnings"] = "; ".join([*warnings, *wrong]) or "none"
    return facts


def addresses() -> dict[str, str]:
    """Interface -> its IPv4 address, "" where it has none or this system does not say."""
    found = {}
    for _, name in socket.if_nameindex():
        found[name] = ""
        try:
            from fcntl import ioctl

            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
                found[name] = socket.inet_ntoa(ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))[20:24])
        except (ImportError, OSError):
            pass
    return found


def _meeting(environment: Mapping[str, str]) -> tuple[str, list[str]]:
    host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if "WORLD_SIZE" not in environment:
        return "nowhere, no launcher", []
    if not host or not port.isdecimal():
        seen = f"MASTER_ADDR={host or 'not set'}, MASTER_PORT={port or 'not set'}"
        return "nowhere", [f"WORLD_SIZE is set and {seen}: ranks do not know where to meet; start them with torchrun, or set both in every process"]
    resolved = _resolved(host)
    if not resolved:
        return f"{host}:{port}", [
            f"MASTER_ADDR={host} does not resolve to an address on this machine, so this rank will wait in vain; give its number"
        ]
    return f"{host}:{port}" + (f" ({resolved[0]})" if resolved[0] != host else ""), []


def _of_gloo(environment: Mapping[str, str], interfaces: Mapping[str, str], several_machines: bool) -> tuple[str, list[str]]:
    """The interface named by GLOO_SOCKET_IFNAME, else the first address of the host's name that this machine can listen on, else the loopback."""
    known = ", ".join(interfaces)
    if asked := environment.get("GLOO_SOCKET_IFNAME", ""):
        absent = [name for name in asked.split(",") if name not in interfaces]
        told = ", ".join(f"{name} {interfaces.get(name, '')}".strip() for name in asked.split(","))
        wrong = [f"GLOO_SOCKET_IFNAME={asked}: there is no interface {', '.join(absent)} here, there are {known}"] if absent else []
        return f"{told} (GLOO_SOCKET_IFNAME)", wrong
    host = socket.gethostname()
    own = [address for address in _resolved(host) if _can_listen(address)]
    address = own[0] if own else "127.0.0.1"
    name = next((name for name, there in interfaces.items() if there == address), "")
    why = f"the host name {host} resolves to it" if own else f"the host name {host} does not resolve to an address of this machine"
    told = f"{name} {address} ({why})".strip()
    if not address.startswith("127."):
        return told, []
    if not several_machines:
        return f"{told}: for ranks on this machine only", []
    return told, [
        f"gloo would listen on {address}, where other machines cannot reach it: set GLOO_SOCKET_IFNAME to the interface of the network between them "
        f"({known})"
    ]


def _resolved(host: str) -> list[str]:
    try:
        return list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))
    except OSError:
        return []


def _can_listen(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.bind((address, 0))
    except OSError:
        return False
    return True
