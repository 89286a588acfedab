"""Whether a planned step fits into the memory that this machine has free. Linux says; elsewhere nothing is known and nothing is said."""

from pathlib import Path

from packhorse.errors import UserError
from packhorse.units import format_bytes

_CGROUPS = ((Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),)


def free_bytes(meminfo: Path = Path("/proc/meminfo"), cgroups: tuple[tuple[Path, Path], ...] = _CGROUPS) -> int | None:
    """What the system says is available, or what the control group of this process has left if that is less; None where neither is known.

    cgroups: (limit, usage) files of version 2; a limit of "max" is none.
    """
    found = [int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")] if meminfo.exists() else []
    for limit, usage in cgroups:
        if limit.exists() and usage.exists() and (text := limit.read_text().strip()).isdecimal():
            found.append(max(0, int(text) - int(usage.read_text())))
    return min(found, default=None)


def fit_line(peak_bytes: int, free: int | None, num_ranks: int = 1) -> str:
    """One sentence for a person who looks at a plan; "" where nothing is known. peak_bytes: of one rank."""
    if free is None:
        return ""
    if num_ranks > 1:
        room = min(num_ranks, free // max(peak_bytes, 1))
        return f"this machine has {format_bytes(free)} free: {'all' if room == num_ranks else f'{room} of the'} {num_ranks} ranks fit"
    return f"this machine has {format_bytes(free)} free: the step {'fits' if peak_bytes <= free else 'does not fit'}"


def require_fit(peak_bytes: int, held_bytes: int, free: int | None, num_ranks: int = 1) -> None:
    """Raises UserError if the step needs more than is free. held_bytes: of the model, whose memory the step takes over. Both are of all ranks on this
    machine, num_ranks of them."""
    if free is not None and peak_bytes > free + held_bytes:
        who, models = ("the step needs", "model") if num_ranks == 1 else (f"the {num_ranks} ranks on this machine need", "models")
        more = "" if num_ranks == 1 else "a higher mesh.zero_stage, fewer ranks on one machine, "
        raise UserError(
            f"{who} {format_bytes(peak_bytes)}, and this machine has {format_bytes(free)} free beside the {format_bytes(held_bytes)} of the "
            f"{models}, so it would be killed; nothing was started. Take {more}a smaller data.micro_batch_size or data.seq_len, an optimizer with "
            "less state, 16 bits (precision.compute), or a smaller model; packhorse plan says what each needs"
        )
