"""The claims of the demo: loaded state is bit-identical, training goes on unchanged, no kill costs a committed step."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

from fingerprint import MODEL_GROUPS, Fingerprint

LOSS_TOLERANCE = 1e-5
"""Relative. Other world sizes add the same numbers in another order, which shows at about 1e-7."""


@dataclass(frozen=True, kw_only=True)
class GroupCheck:
    """How one group of state (say, all exp_avg) came back."""

    group: str
    total: int
    differences: tuple[str, ...]


def compare_states(saved: Fingerprint, loaded: Fingerprint) -> list[GroupCheck]:
    """Compare group by group; an entry that only one side has is a difference too."""
    groups = {**saved, **loaded}
    return [_compare_group(group, saved.get(group, {}), loaded.get(group, {})) for group in groups]


def _compare_group(group: str, saved: dict[str, str], loaded: dict[str, str]) -> GroupCheck:
    names = {**saved, **loaded}
    differences = tuple(
        f"{group}: {name}: saved {saved.get(name, 'nothing')}, loaded {loaded.get(name, 'nothing')}"
        for name in names
        if saved.get(name) != loaded.get(name)
    )
    return GroupCheck(group=group, total=len(names), differences=differences)


def right_before_loading(saved: Fingerprint, fresh: Fingerprint) -> list[str]:
    """Model tensors that had their saved value before the load: finding it there later proves nothing."""
    return [
        f"{group}: {name}: already had its saved value before loading"
        for group in MODEL_GROUPS
        for name, digest in saved[group].items()
        if fresh[group].get(name) == digest
    ]


def lost_steps(starts: Sequence[tuple[int | None, Set[int]]]) -> list[str]:
    """The starts that began before a step that an earlier one had committed; given what each restored and committed."""
    problems = []
    newest = 0
    for number, (restored, committed) in enumerate(starts, start=1):
        if restored is None or restored < newest:
            problems.append(f"start {number} of D: restored step {restored}, though step {newest} was committed")
        newest = max(newest, *committed, 0)
    return problems


def loss_spread(losses: list[float]) -> float:
    """The largest relative distance between the jobs' losses of one step."""
    if not all(map(math.isfinite, losses)):
        return math.inf
    return (max(losses) - min(losses)) / abs(min(losses))


def compare_losses(curves: dict[str, dict[int, float]], steps: range) -> list[str]:
    """The steps at which the curves lie further apart than floating-point arithmetic explains."""
    problems = []
    for step in steps:
        missing = [name for name, curve in curves.items() if step not in curve]
        if missing:
            problems.append(f"step {step}: no loss from job {', '.join(missing)}")
            continue
        spread = loss_spread([curve[step] for curve in curves.values()])
        if spread > LOSS_TOLERANCE:
            values = ", ".join(f"{name} {curve[step]:.6f}" for name, curve in curves.items())
            problems.append(f"step {step}: losses {spread:.0e} apart (allowed: {LOSS_TOLERANCE:.0e}): {values}")
    return problems
