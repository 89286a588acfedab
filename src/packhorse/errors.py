"""Errors that a user can cause. Each message is one paragraph: what, where, seen, expected, what to try.

The command line prints the paragraph without a traceback and exits with code 2; from Python they are ordinary ValueErrors.
Checkers (`verify`, `check_schedule`, `check_layout`, `check_program`) raise `CheckError`: that is a bug in packhorse, not in the user's input.
"""


class UserError(ValueError):
    """Base of everything that a user can get wrong and put right."""


class CaptureError(UserError):
    """The model's training step cannot be captured as one graph; names the module and the line."""


class BatchError(UserError):
    """A batch does not have the structure, dtype or number of dims that the plan was made for."""


class BudgetError(UserError):
    """No plan of the asked method meets the budget; names the least budget that works and the instant that forbids less."""


class NonFiniteError(UserError):
    """The loss is NaN or infinite; names the step. Parameters are those of before the step."""


class ConfigError(UserError):
    """A configuration file or a `--set` is wrong; names the key and the nearest known one."""


class DataError(UserError):
    """Missing, too little or unreadable training data."""


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete, corrupt, foreign, or could not be written."""


class PeerError(UserError):
    """Another rank is gone, has failed or came to another collective. peer: the rank at the other end, if known; seen: what the transport
    said; collective: the one that this rank was in."""

    def __init__(self, peer: int | None, seen: str, collective: str = ""):
        super().__init__(f"the collective {collective!r} with {'other ranks' if peer is None else f'rank {peer}'} failed: {seen}")
        self.peer, self.seen, self.collective = peer, seen, collective


class CheckError(AssertionError):
    """A checker found that a stage of the pipeline broke its own rules."""
