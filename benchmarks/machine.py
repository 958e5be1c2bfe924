"""What the numbers were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "safetensors", "torch_checkpointing", "torchsnapshot", "xxhash", "isal")


def describe(folder: Path) -> dict[str, Any]:
    """Processor, memory, disk and versions."""
    return {
        "processor": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(_field("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "disk": _disk(folder),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "holdfast": _holdfast(),
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def _field(path: str, name: str) -> str:
    try:
        for line in Path(path).read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    except OSError:
        pass
    return "0" if name == "MemTotal" else "unknown"


def _disk(folder: Path) -> dict[str, Any]:
    """The file system that holds the folder, and the device below it."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            kind, source, *_ = after.split()
            rotational = Path(f"/sys/dev/block/{number}/queue/rotational")
            return {
                "file_system": kind,
                "device": source,
                "options": before.split()[5],
                "rotational": rotational.read_text().strip() == "1" if rotational.exists() else None,
            }
    return {"file_system": "unknown"}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _holdfast() -> dict[str, Any]:
    from holdfast import __version__

    return {"version": __version__, "commit": commit()}


def is_changed(commit: str | None) -> bool:
    """Whether the code had changes that are in no commit, by what ``commit`` says of it."""
    return (commit or "").endswith("-dirty")


def commit() -> str | None:
    """Which code this is, if it is in a repository."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
