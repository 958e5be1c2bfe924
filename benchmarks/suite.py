"""What all parts of the suite share: where they write, how much, how long, and where results go."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.rounds import Allowance, Measure
from benchmarks.scales import MIB, Scale
from tests.rank_pool import RankPool  # the processes that the tests use, too


@dataclass
class Suite:
    """One run of the suite."""

    folder: Path
    scale: Scale
    minutes: float
    ranks: RankPool
    measures: dict[str, Measure] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Numbers of bytes, rather than of seconds."""
    problems: dict[str, str] = field(default_factory=dict)
    """Parts of the suite that failed as a whole."""
    started: float = field(default_factory=time.monotonic)

    def allowance(self, share: float, *, has_target: bool = True) -> Allowance:
        """A share of the whole time, for one measure. What has no target gets as few rounds as there may be."""
        scale = self.scale
        rounds = scale.rounds if has_target else scale.fewest_rounds
        return Allowance(60 * self.minutes * share, scale.fewest_rounds, rounds, scale.most_rounds)

    def place(self, name: str) -> Path:
        """Where a contender writes."""
        return self.folder / "".join(letter if letter.isalnum() else "-" for letter in name)

    def log(self, text: str) -> None:
        """Show how far it is."""
        print(f"[{time.monotonic() - self.started:4.0f} s] {text}", flush=True)


def remove(folder: Path) -> None:
    """Remove a checkpoint, and have the disk forget it now: freed blocks may be discarded at the next flush."""
    if folder.exists():
        nbytes = sum(path.stat().st_size for path in folder.rglob("*"))
        shutil.rmtree(folder)
        if nbytes > 16 * MIB:  # less is soon forgotten
            os.sync()
