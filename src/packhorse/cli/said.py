"""An error that several ranks of a job have is said once. The launcher's store, which outlives a rank, knows who was first."""

import os
import socket
from collections.abc import Mapping
from datetime import timedelta

from packhorse.errors import PeerError, UserError

_PATIENCE = timedelta(seconds=2)  # for a store that may be gone with its job


def said_by_another(error: UserError, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a rank of this job has said it already: in the same words, or as the reason why this one could not go on (PeerError).

    False where this process is alone or nobody can be asked: better twice than not at all.
    """
    rank, host, port = (environment.get(name, "") for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    if environment.get("WORLD_SIZE", "1") == "1" or not (rank.isdecimal() and host and port.isdecimal()):
        return False
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        socket.create_connection((host, int(port)), _PATIENCE.total_seconds()).close()  # torch would say at length that nobody is there
        from torch.distributed import TCPStore

        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=_PATIENCE)
        first = store.compare_set(f"packhorse said {attempt}", "", f"{rank} {error}").decode()
    except (OSError, RuntimeError):
        return False
    speaker, _, words = first.partition(" ")
    return speaker != rank and (isinstance(error, PeerError) or words == str(error))
