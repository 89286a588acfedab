"""Which degrees of tensor parallelism a plan allows: what each number that is shared out asks of the degree. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packhorse.errors import UserError

_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")


@dataclass(frozen=True)
class Share:
    """`number` things are dealt out evenly to the ranks. repeats: where there are more ranks than things, several ranks may have the same one."""

    what: str
    number: int
    repeats: bool = False

    def allows(self, degree: int) -> bool:
        """Whether `degree` ranks can share them."""
        return self.number % degree == 0 or (self.repeats and degree % self.number == 0)


def require_degree(shares: Sequence[Share], degree: int) -> None:
    """Raises UserError naming the first share that `degree` ranks cannot have, and the degrees that all of them allow."""
    refused = next((share for share in shares if not share.allows(degree)), None)
    if refused is None:
        return
    most = min(share.number for share in shares if not share.repeats)
    works = [str(d) for d in range(2, most + 1) if all(share.allows(d) for share in shares)]
    rule = "the degree has to divide them or be a multiple of them" if refused.repeats else "the degree has to divide that"
    raise UserError(
        f"tp={degree}: {refused.what}, and {rule}; "
        + (f"degrees that work: {', '.join(works)}" if works else "no degree above 1 works for all that the plan cuts: leave some of it whole")
    )


def heads_at(modules: Mapping[str, Any], name: str) -> tuple[int | None, int | None, bool]:
    """(heads, key/value heads, whether it is part of an attention) of the module or parameter `name`; None where nothing above it says how many.

    What the nearest module above says of itself comes before what its configuration says. modules: all of the model, by name.
    """
    above = name.rpartition(".")[0]
    attention = any("attn" in part or "attention" in part for part in name.lower().split("."))
    attention = attention or _number([modules[above]], _HEADS) is not None
    at = name
    while at:
        at = at.rpartition(".")[0]
        config: Any = getattr(modules[at], "config", None)
        holders = [modules[at], config.get_text_config() if hasattr(config, "get_text_config") else config]
        if heads := _number(holders, _HEADS):
            return heads, _number(holders, _KEY_HEADS), attention
    return None, None, attention


def _number(holders: list[Any], names: tuple[str, ...]) -> int | None:
    found = (getattr(holder, name, None) for holder in holders for name in names)
    return next((n for n in found if isinstance(n, int) and not isinstance(n, bool) and n > 0), None)
