"""What a preflight found out: for programs as fields, for people as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast._watching.progress import size

Check = Literal["state", "path", "write", "shared", "space", "memory", "writer"]


@dataclass(frozen=True)
class Problem:
    """Something that would make saves fail, and what to do about it."""

    check: Check
    ranks: tuple[int, ...]
    """Where it was found."""
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class PreflightReport:
    """What saves of this state to this place will be like. Numbers are None if nobody knows them."""

    path: str
    world_size: int
    is_async: bool
    problems: tuple[Problem, ...]
    tensor_count: int | None
    checkpoint_bytes: int | None
    """Of one checkpoint."""
    kept: int | None
    """How many are kept; None for all."""
    needed_bytes: int | None
    """On the disk, with all that are kept and one that is being written, beyond what is there already."""
    free_bytes: int | None
    memory_needed: int | None
    """Of the rank that needs most, beyond the state."""
    memory_available: int | None
    """Of the machine or container that has least, for all its ranks."""
    write_rate: float | None
    """Bytes that all ranks together can make durable in a second."""
    copy_rate: float | None
    """Bytes that the slowest rank can copy in a second."""
    stall_seconds: float | None
    """How long training will stand still for a save."""
    save_seconds: float | None
    """How long it will be until a checkpoint is committed."""
    writer_seconds: float | None
    """What it took to start the writer process, if there is one. The first save finds it running."""

    def __str__(self) -> str:
        return "\n".join([self._headline(), *self._problems(), *self._sizes(), *self._speeds()])

    def _headline(self) -> str:
        ranks = f" on {self.world_size} ranks" if self.world_size > 1 else ""
        count = len(self.problems)
        verdict = {0: "all is well", 1: "1 problem"}.get(count, f"{count} problems")
        return f"preflight for {self.path}{ranks}: {verdict}"

    def _problems(self) -> list[str]:
        return [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)]

    def _sizes(self) -> list[str]:
        lines = []
        if self.checkpoint_bytes is not None:
            free = "" if self.free_bytes is None else f", and {self._fitting()}"
            lines.append(f"  a checkpoint has {size(self.checkpoint_bytes)} in {self.tensor_count:,} tensors{free}")
        if self.memory_needed is not None:
            available = "" if self.memory_available is None else f" of {size(self.memory_available)} that are left"
            lines.append(f"  a save takes up to {size(self.memory_needed)} of memory on a rank{available}")
        return lines

    def _fitting(self) -> str:
        assert self.free_bytes is not None
        assert self.checkpoint_bytes is not None
        count = self.free_bytes // max(1, self.checkpoint_bytes)
        return f"{count:,} of them fit into the {size(self.free_bytes)} that are free"

    def _speeds(self) -> list[str]:
        lines = []
        if self.write_rate is not None:
            copying = "" if self.copy_rate is None else f"; {size(self.copy_rate)}/s from memory to memory"
            lines.append(f"  measured: {size(self.write_rate)}/s to the disk, durable{copying}")
        if self.save_seconds is not None and self.stall_seconds is not None:
            stall = f"{self.stall_seconds * 1000:,.0f} ms" if self.stall_seconds < 1 else f"{self.stall_seconds:,.1f} s"
            lines.append(f"  estimate: committed after {self.save_seconds:,.2f} s; training pauses for {stall}")
        if self.writer_seconds is not None:
            lines.append(f"  the writer process started in {self.writer_seconds:.1f} s")
        return lines
