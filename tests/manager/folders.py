"""Folders with real checkpoints for the tests of the manager's storage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast._manager.run_file import RunFile
from holdfast._manager.steps import StepInfo, folder_of, list_steps
from holdfast._manager.summaries import noted_metadata
from holdfast.stores import Root

TOKEN = "this job"


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((4,), float(step)), "step": step}


def save_step(root: Root, step: int, metrics: Mapping[str, Any] | None = None, **options: Any) -> None:
    """A save as the manager makes it: noted before and after."""
    run_file, name = RunFile(root), folder_of(step)
    run = run_file.begin(TOKEN, {name: ""}).run
    holdfast.save(state_of(step), root.child(name), metadata=noted_metadata(run, step, metrics), **options)
    run_file.end(TOKEN, [name])


def a_run(root: Root, *steps: int) -> RunFile:
    """A run that this job owns, with these steps."""
    run_file = RunFile(root)
    run_file.claim(TOKEN)
    for step in steps:
        save_step(root, step)
    return run_file


def steps_in(root: Root) -> dict[int, StepInfo]:
    return {info.step: info for info in list_steps(root, RunFile(root).read())}


def loads(root: Root, step: int) -> bool:
    """Whether the step is there as it was saved."""
    loaded = holdfast.open(root.child(folder_of(step))).read()
    return bool(torch.equal(loaded["weight"], state_of(step)["weight"])) and loaded["step"] == step


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
