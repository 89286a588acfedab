"""Facts about the machine that decide what a run can do, as name -> value. Sizes in GiB; Linux files that are absent read "unknown"."""

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packhorse.cli.network import describe_network

_GIB = 2**30


def describe_machine() -> dict[str, str | int | float]:
    """Versions, threads, CPU, memory, huge pages, disk and accelerators of this machine; then its place among ranks, and their network."""
    import torch

    memory = _proc_fields(Path("/proc/meminfo"))
    disk = shutil.disk_usage(Path.cwd())
    return {
        "packhorse": _version("packhorse"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "cpu": _proc_fields(Path("/proc/cpuinfo")).get("model name", platform.processor() or "unknown"),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "torch threads": torch.get_num_threads(),
        "memory GiB": _kib_in_gib(memory.get("MemTotal")),
        "available GiB": _kib_in_gib(memory.get("MemAvailable")),
        "huge pages": _chosen(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "disk free GiB": round(disk.free / _GIB, 1),
        "accelerators": ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or "none",
        **describe_network(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _proc_fields(path: Path) -> dict[str, str]:
    """The first value of each "name: value" line; none where the file does not exist, as outside Linux."""
    fields: dict[str, str] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


def _kib_in_gib(text: str | None) -> str | float:
    return "unknown" if text is None else round(int(text.split()[0]) * 1024 / _GIB, 1)


def _chosen(path: Path) -> str:
    """The kernel writes its choices in one line, the present one in brackets: always [madvise] never."""
    if not path.exists():
        return "unknown"
    return path.read_text().partition("[")[2].partition("]")[0] or "unknown"
