"""The tables of a device file, checked as they are read. No torch."""

from dataclasses import dataclass
from typing import Any

from packhorse.errors import UserError

_MOST = 1e18  # of any number: larger ones are slips of the pen


@dataclass(frozen=True)
class Table:
    """One table of a device file. where: its name in the file, "" for the file itself; source: the file, as messages name it.

    Every method raises UserError for what is wrong: file, key, what stands there, what was expected.
    """

    entries: dict[str, Any]
    where: str
    source: str

    def only(self, *keys: str, hint: str = "") -> None:
        """No other keys than these."""
        for key in self.entries.keys() - set(keys):
            inside = f" in {self.where}" if self.where else ""
            raise UserError(f"the device file {self.source} has an unknown key {key!r}{inside}; it has {', '.join(keys)}{hint}")

    def text(self, key: str) -> str:
        """A string."""
        return self._checked(key, isinstance(self.entries.get(key), str), "a string")

    def seconds(self, key: str) -> float:
        """Seconds, 0 or more."""
        return float(self._checked(key, _is_number(self.entries.get(key), 0), "a finite number of seconds, 0 or more"))

    def rate(self, key: str, of: str) -> float:
        """A number a second, above 0."""
        return float(self._checked(key, _is_number(self.entries.get(key), 0) and self.entries[key] > 0, f"a finite number of {of} a second, above 0"))

    def whole(self, key: str, least: int, of: str) -> int:
        """A whole number."""
        seen = self.entries.get(key)
        return self._checked(key, _is_number(seen, least) and isinstance(seen, int), f"a whole number of {of}, {least} or more")

    def share(self, key: str) -> float:
        """A number above 0, at most 1."""
        return float(self._checked(key, _is_number(self.entries.get(key), 0) and 0 < self.entries[key] <= 1, "a number above 0, at most 1"))

    def pair(self, key: str, expected: str) -> tuple[float, float]:
        """A list of two numbers, none negative."""
        first, second = self._checked(key, _is_pair(self.entries.get(key)), expected)
        return float(first), float(second)

    def pairs(self, key: str, expected: str) -> tuple[tuple[float, float], ...]:
        """A list of such lists."""
        given = self.entries.get(key)
        right = isinstance(given, list) and all(_is_pair(entry) for entry in given)
        return tuple((float(first), float(second)) for first, second in self._checked(key, right, expected))

    def table(self, key: str, expected: str) -> "Table":
        """A table in this one."""
        where = f"{self.where}.{key}" if self.where else key
        return Table(self._checked(key, isinstance(self.entries.get(key), dict), expected), where, self.source)

    def wrong(self, key: str, expected: str) -> UserError:
        """The error for a key whose entry is missing or not as expected."""
        place = f"{key} of {self.where}" if self.where else key
        seen = f"is {self.entries[key]!r}" if key in self.entries else "is missing"
        return UserError(f"the device file {self.source}: {place} {seen}, expected {expected}")

    def _checked(self, key: str, right: bool, expected: str) -> Any:
        if not right:
            raise self.wrong(key, expected)
        return self.entries[key]


def _is_number(given: Any, least: float) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool) and least <= given <= _MOST


def _is_pair(given: Any) -> bool:
    return isinstance(given, list) and len(given) == 2 and all(_is_number(number, 0) for number in given)
