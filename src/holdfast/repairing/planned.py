"""A problem and what would be done about it, before anybody has decided that it shall be done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.errors import HoldfastError
from holdfast.repairing.report import Finding, Outcome


@dataclass(frozen=True)
class Planned:
    """Something that is wrong, and the way to put it right if there is one."""

    path: str
    problem: str
    remedy: str = ""
    loses: str = ""
    keys: Sequence[str] = ()
    do: Callable[[], None] | None = None
    """Puts it right. None if that cannot be done."""

    def carried_out(self, *, apply: bool) -> Finding:
        """Do it, if ``apply``; and tell what became of it."""
        outcome: Outcome = "cannot be repaired" if self.do is None else "can be repaired"
        remedy = self.remedy
        if apply and self.do is not None:
            try:
                self.do()
                outcome = "repaired"
            except (HoldfastError, OSError) as error:
                outcome, remedy = "failed", str(error)
        return Finding(self.path, self.problem, outcome, remedy, self.loses, self.keys)
