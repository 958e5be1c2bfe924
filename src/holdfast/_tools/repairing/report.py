"""What a repair found, what it would do, what it did, and what nobody can do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from holdfast._formats.folder_files import KEPT
from holdfast._stores.store import Store
from holdfast._watching.progress import size
from holdfast.errors import HoldfastError

# What a repair found, what it did, and what nobody can do.


Outcome = Literal["can be repaired", "repaired", "cannot be repaired", "failed"]
Fate = Literal["can be removed", "removed", "kept"]

_MOST_SHOWN = 10


@dataclass(frozen=True)
class Finding:
    """Something that is wrong."""

    path: str
    """Of the file or folder that it is about."""
    problem: str
    outcome: Outcome
    remedy: str = ""
    """What is done about it, or what the user can do."""
    loses: str = ""
    """What is not as before after the repair."""
    keys: Sequence[str] = ()
    """Entries of the checkpoint that are lost."""

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.problem}"]
        if self.keys:
            more = f" and {len(self.keys) - _MOST_SHOWN} more" if len(self.keys) > _MOST_SHOWN else ""
            lines.append(f"  lost keys: {', '.join(self.keys[:_MOST_SHOWN])}{more}")
        lines.append(f"  {self.outcome}: {self.remedy}" if self.remedy else f"  {self.outcome}")
        if self.loses:
            lines.append(f"  but: {self.loses}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Leftover:
    """Files in one folder that no checkpoint needs."""

    path: str
    """Of the folder."""
    names: Sequence[str]
    nbytes: int
    why: str
    """What they are."""
    fate: Fate
    reason: str = ""
    """Why they are kept."""

    def __str__(self) -> str:
        files = f"{len(self.names)} file{'' if len(self.names) == 1 else 's'}"
        kept = f" ({self.reason})" if self.reason else ""
        return f"{self.path}: {files}, {size(self.nbytes)}, {self.why}: {self.fate}{kept}"


@dataclass(frozen=True)
class RepairReport:
    """The answer of ``holdfast.repair``."""

    path: str
    findings: Sequence[Finding]
    leftovers: Sequence[Leftover]
    applied: bool
    """Whether anything was to be changed; False for a dry run."""
    checked: Sequence[str] = field(default_factory=tuple)
    """The checkpoints that were looked at."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong any more. Leftover files take space and do no other harm."""
        return all(finding.outcome == "repaired" for finding in self.findings)

    @property
    def leftover_bytes(self) -> int:
        """What could be removed, or was."""
        return sum(leftover.nbytes for leftover in self.leftovers if leftover.fate != "kept")

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "ok": self.ok, "leftover_bytes": self.leftover_bytes}

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings]
        if not self.findings:
            count = len(self.checked)
            lines.append(
                f"{self.path}: nothing is wrong with the indexes of {count} checkpoint{'' if count == 1 else 's'}, and "
                "no file is missing or too short. Content is not compared here; holdfast verify does that"
            )
        lines += [str(leftover) for leftover in self.leftovers]
        if not self.applied and any(finding.outcome == "can be repaired" for finding in self.findings):
            lines.append("Nothing was changed. --apply (in Python: apply=True) repairs what can be.")
        if any(leftover.fate == "can be removed" for leftover in self.leftovers):
            lines.append(
                f"{size(self.leftover_bytes)} can be removed by --sweep --apply (in Python: sweep=True, apply=True)."
            )
        return "\n".join(lines)


# A problem and what would be done about it, before anybody has decided that it shall be done.


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
        """Do it, if ``apply``; and report what became of it."""
        outcome: Outcome = "cannot be repaired" if self.do is None else "can be repaired"
        remedy = self.remedy
        if apply and self.do is not None:
            try:
                self.do()
                outcome = "repaired"
            except (HoldfastError, OSError) as error:
                outcome, remedy = "failed", str(error)
        return Finding(self.path, self.problem, outcome, remedy, self.loses, self.keys)


# What a repair replaces is kept beside it, under another name.


def keep_copy(store: Store, name: str) -> bytes | None:
    """What is in a file, of which a copy is kept beside it; None if there is no such file."""
    try:
        content = store.read(name)
    except FileNotFoundError:
        return None
    taken = {listed.name for listed in store.list()}
    copies: Iterable[str] = (f"{name}{KEPT}{number}" for number in ("", *range(2, 1000)))
    free = next((copy for copy in copies if copy not in taken or store.read(copy) == content), None)
    if free is not None and free not in taken:
        store.put(free, content)
    return content
