"""Where ranks leave word for each other outside of collectives: which of them failed first and why, and where each of them is.

It lies in the store of the launcher, which outlives a rank that ends.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

from packhorse.errors import PeerError, UserError
from packhorse.runtime.transport import Transport

_EVERY_S = 5.0  # a rank says where it is
_PATIENCE_S = 1.0  # that a rank whose peer is gone waits for the word of the one that failed first


class Board:
    """Seen by one rank of `num_ranks`. store: a torch.distributed store that all of them share. step: the one that this rank is in."""

    def __init__(self, store: Any, rank: int, num_ranks: int):
        self.store, self.rank, self.num_ranks = store, rank, num_ranks
        self.step = 0
        self.attempt = 0  # all ranks come to it together: what failed in an earlier one is past
        self.transports: Sequence[Transport] = ()

    def watch(self, transports: Sequence[Transport]) -> None:
        """From now on says, every few seconds, where this rank is. transports: those that it waits for, one or more."""
        self.transports = transports
        Thread(target=self._say_where, name="where", daemon=True).start()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Inside, an error is put up for all ranks to see. Where another rank is the reason, PeerError says what that one said; where it has said
        nothing, that is put up: ranks that have nothing to do with it wait for those that have."""
        self.attempt += 1
        try:
            yield
        except PeerError as error:
            raise self._explained(error) from error
        except BaseException as error:
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            self._tell(self.rank, f"rank {self.rank} failed first, at step {self.step}: {kind}{error}")
            raise

    def look(self) -> None:
        """Raises PeerError if another rank has failed."""
        if (failure := self._failure()) is not None:
            raise PeerError(failure["rank"], "it failed", self._place())

    def _explained(self, error: PeerError) -> PeerError:
        here = f"rank {self.rank} was at step {self.step}, in the collective {error.collective!r}"
        until = time.monotonic() + _PATIENCE_S
        while (failure := self._failure()) is None and time.monotonic() < until:
            time.sleep(0.05)
        if failure is not None:
            text = f"{failure['text']} ({here})"
        elif "imed out" in error.seen:
            text = (
                f"{here}, and waited too long for {'others' if error.peer is None else f'rank {error.peer}'}: {error.seen}; where every rank was "
                f"last: {'; '.join(self._places())}; look at the rank that is behind"
            )
            self._tell(error.peer, text)
        else:
            text = (
                f"{'another rank' if error.peer is None else f'rank {error.peer}'} is gone without a word: it was killed, or its machine or the "
                "network failed; see what the launcher says of it, and start the same command again: it continues from the last checkpoint"
            )
            self._tell(error.peer, text)
            text += f" ({here}; {error.seen})"
        explained = PeerError(error.peer if failure is None else failure["rank"], error.seen, error.collective)
        explained.args = (text,)
        return explained

    def _place(self) -> str:
        """The collective that this rank waits for, or waited for last."""
        return max(self.transports, key=lambda transport: transport.since).place if self.transports else ""

    def _key(self) -> str:
        return f"first failure in {self.attempt}"

    def _failure(self) -> dict[str, Any] | None:
        return self._get(self._key())

    def _places(self) -> list[str]:
        found = []
        for rank in range(self.num_ranks):
            place = self._get(f"where {rank}")
            known = f"step {place['step']}, {place['place']!r}, {place['for_s']:.0f} s long" if place else "has said nothing yet"
            found.append(f"rank {rank}: {known}")
        return found

    def _say_where(self) -> None:
        seen, since = None, time.monotonic()
        while True:
            now = (self.step, self._place())
            if now != seen:
                seen, since = now, time.monotonic()
            try:
                self.store.set(f"where {self.rank}", json.dumps({"step": now[0], "place": now[1], "for_s": time.monotonic() - since}))
            except RuntimeError:  # the store is gone with the launcher
                return
            time.sleep(_EVERY_S)

    def _tell(self, rank: int | None, text: str) -> None:
        """Puts up that a rank is the reason why others cannot go on. An earlier word stays."""
        with suppress(RuntimeError):  # the store is gone with the launcher
            self.store.compare_set(self._key(), "", json.dumps({"rank": rank, "text": text}))

    def _get(self, key: str) -> dict[str, Any] | None:
        try:
            return json.loads(self.store.get(key)) if self.store.check([key]) else None
        except RuntimeError:
            return None
