"""What is made once for all tests of a run, however many processes pytest spreads them over."""

import fcntl
import json
import os
from collections.abc import Callable
from typing import Any


def once(tmp_path_factory: Any, name: str, make: Callable[[], Any]) -> Any:
    """What `make` returns, JSON-able; only the first of all processes calls it, the others wait for it."""
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"{name}.json"
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        if not text:
            text = json.dumps(make())
            file.write(text)
    return json.loads(text)
