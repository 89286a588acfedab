"""Python's search for cycles of garbage, put off while a graph is made.

A graph of 400,000 nodes is millions of objects that live on and hold no cycles; looking through all of them again and again takes longer than to
make them.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_search_for_cycles() -> Iterator[None]:
    """Inside it nothing is searched; memory without cycles is freed as ever. At the end it is as it was."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
