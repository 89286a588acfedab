"""Bytes, seconds and counts as people read and write them. GiB = 2**30 bytes (papers' GB = 1e9 are said where they are used)."""

import re

from packhorse.errors import UserError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str) -> int:
    """ "6GiB", "300 MB" or "1048576" -> bytes. Raises UserError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", text.upper())
    if match is None or match[2] not in _UNITS:
        raise UserError(f"cannot read {text!r} as a number of bytes; write for example 6GiB, 300MB or 1048576")
    return int(float(match[1]) * _UNITS[match[2]])


def format_bytes(num_bytes: int) -> str:
    """Bytes -> "1.234 GiB", with the unit that leaves one to three digits before the point."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.3f} {unit}"
    return f"{num_bytes} B"


def format_seconds(seconds: float) -> str:
    """Seconds -> "1:02:03" or "4:05"."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def align_up(num_bytes: int, alignment: int) -> int:
    """The least multiple of `alignment` that is >= num_bytes."""
    return -(-num_bytes // alignment) * alignment
