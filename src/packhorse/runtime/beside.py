"""Work beside the computation: calls that run one after another in a thread of their own, in the order in which they are started."""

import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import torch

from packhorse.errors import PeerError

LAST_S = 1.0  # that the end of a process waits for such a thread
LOOK_AROUND_S = 2.0  # a wait that takes longer asks whether another rank has failed


class Beside:
    """Such a thread. name: what it does, for whoever looks at the threads of a process.

    blocking: every start waits for the end at once, to see what overlapping brings. place: the call that is waited for, or was waited for last, and
    since: when that began. look_around: is called during long waits, and may raise.
    """

    def __init__(self, name: str, look_around: Callable[[], None] = lambda: None):
        self.look_around = look_around
        self.blocking = False
        self.place, self.since = "", 0.0
        self.started: dict[str, _Started] = {}
        self.queue: SimpleQueue[_Started | None] = SimpleQueue()
        # a daemon: a process that ends with an error must not wait for a collective that never comes
        thread = Thread(target=_work, args=(self.queue,), name=name, daemon=True)
        thread.start()
        # an idle one ends before the interpreter does, which would stop it wherever it is, inside of torch too
        weakref.finalize(self, _end, self.queue, thread)

    def start(self, tag: str, call: Callable[..., None], *args: Any) -> None:
        """Runs a call behind those started before. tag: its name, for `wait`."""
        self.started[tag] = started = _Started(tag, call, args)
        self.queue.put(started)
        if self.blocking:
            started.ended(-1)

    def wait(self, tag: str) -> None:
        """Until it has ended. Raises what it raised (PeerError if another rank is gone), and what `look_around` raises."""
        self.place, self.since = tag, time.monotonic()
        started = self.started.pop(tag)
        while not started.ended(LOOK_AROUND_S):
            self.look_around()
        if started.error is not None:
            raise started.error

    def now(self, tag: str, call: Callable[..., None], *args: Any) -> None:
        """Runs a call to its end."""
        self.start(tag, call, *args)
        self.wait(tag)

    def drop(self) -> None:
        """Forgets what was started and never waited for, after an error."""
        self.started.clear()

    def finish(self) -> None:
        """The same, once it has ended: whoever comes next may use its memory."""
        for started in self.started.values():
            started.ended(-1)
        self.drop()


class _Started:
    """A call under way, or in the queue."""

    __slots__ = ("args", "call", "error", "running", "tag")

    def __init__(self, tag: str, call: Callable[..., None], args: tuple):
        self.tag, self.call, self.args = tag, call, args
        self.error: Exception | None = None
        self.running = Lock()  # in place of an Event, which is several times as slow
        self.running.acquire()

    def ended(self, seconds: float) -> bool:
        """Waits for the end, or for so long (-1: for ever); whether it has come."""
        if not self.running.acquire(timeout=seconds):
            return False
        self.running.release()
        return True


def _work(queue: "SimpleQueue[_Started | None]") -> None:
    broken: Exception | None = None  # a group of ranks does not survive a failed collective
    while True:
        started = queue.get()
        if started is None:
            return
        if broken is None:
            try:
                with torch.inference_mode():
                    started.call(*started.args)
            except Exception as error:  # raised where it is waited for
                broken = error
                if isinstance(error, PeerError):
                    error.collective = started.tag
        started.error = broken
        started.args = ()
        started.running.release()


def _end(queue: "SimpleQueue[_Started | None]", thread: Thread) -> None:
    """Ends the thread; one that waits for a rank which is gone is left alone."""
    queue.put(None)
    thread.join(LAST_S)
