"""What a checkpoint is, in a few words: name, step, when, by whom, what was noted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from holdfast.manager.summaries import NOTE
from holdfast.plain_data import plain
from holdfast.sources.source import Source


def description(source: Source) -> dict[str, Any]:
    """Plain JSON about a checkpoint as a whole."""
    noted = dict(source.metadata)
    run = noted.pop(NOTE, None)
    run = run if isinstance(run, dict) else {}
    written = dict(source.written)
    metrics = run.get("metrics")
    return {
        "name": name_of(source.location),
        "path": source.location,
        "format": source.format,
        "identity": source.identity,
        "run": run.get("run"),
        "step": run.get("step"),
        "reason": run.get("reason") or None,
        "metrics": plain(metrics if isinstance(metrics, dict) else {}),
        "metadata": plain(noted),
        "phases": _phases(written.pop("phases", None)),
        "written": plain(written),
    }


def name_of(location: str) -> str:
    """The last part of a path or URL, with its folder if that says more.

    >>> name_of("/runs/llama/step-00000500"), name_of("s3://bucket/run/"), name_of("model.pt")
    ('llama/step-00000500', 'bucket/run', 'model.pt')
    """
    parts = [
        part for part in PurePosixPath(location.replace("\\", "/")).parts if part != "/" and not part.endswith(":")
    ]
    return "/".join(parts[-2:]) or location


def _phases(found: Any) -> dict[str, list[float]]:
    """Seconds by phase and rank, if that is what was recorded: the file may say anything."""
    if not isinstance(found, Mapping):
        return {}
    return {
        str(name): [float(second) for second in seconds]
        for name, seconds in found.items()
        if isinstance(seconds, list) and all(isinstance(second, (int, float)) for second in seconds)
    }
