"""Before the first step: would saves of this state to this place go well, and how long would they take?

Every rank looks for itself, and all that was found on all ranks is reported at once. Measurements take about a second.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import torch

from holdfast import _settings as settings
from holdfast._background.messages import SaveRequest
from holdfast._background.writer_process import find_main_script, idle_writer, pack_request
from holdfast._base.arguments import Size, checked_size
from holdfast._compat.tensors import local_part
from holdfast._layout.tensor_kinds import is_dtensor
from holdfast._manager.measuring import (
    WriteSpeed,
    look_at,
    measure_copies,
    measure_writes,
    memory_limits,
    share_of,
)
from holdfast._manager.preflight_findings import PreflightFindings, SaveSetup, report_of
from holdfast._manager.preflight_report import Check, PreflightReport, Problem
from holdfast._manager.probing import Probe, folder_of_probe, name_of_measured
from holdfast._ranks.meeting import meeting, own_place
from holdfast._save.capture import Captured
from holdfast._save.options import CheckedOptions
from holdfast._stores.memory_store import MemoryStore
from holdfast._stores.roots import Root, root_at
from holdfast._watching.calls import Call
from holdfast.errors import PreflightError

if TYPE_CHECKING:
    import torch.distributed as dist

    from holdfast._ranks.shared_steps import Collectives

_PATIENCE = 0.4
"""Seconds for each measurement, about."""


def run_preflight(
    state: Any,
    root: str | os.PathLike[str] | Root,
    *,
    kept: int | None = 1,
    stored_bytes: Callable[[], int] = lambda: 0,
    async_save: bool = False,
    writer: Literal["thread", "process"] = "thread",
    copies: int = 1,
    memory_budget: Size | None = None,
    options: Callable[[], CheckedOptions] = CheckedOptions.of,
    note: Callable[[str], None] = lambda folder: None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> PreflightReport:
    """Find out whether saves would go well. All ranks call this together, each with its own part of the state.

    Nothing is saved, and nothing is left at ``root``. Raises ``PreflightError`` with all problems of all ranks.

    Args:
        state: what is to be saved.
        root: where the checkpoints of the run are to be.
        kept: how many of them stay; None for all.
        stored_bytes: returns the bytes of checkpoints of this run that are there already, and go as new ones come. Only
            the coordinator is asked.
        async_save: whether saves go on in the background.
        writer: who writes then. A process is started, and the first save finds it running.
        copies: of the state, at most, that background saves have at once: 2 with ``when_busy="copy"``.
        memory_budget: that of the saves.
        options: returns what else ``save`` is given: which keys, which dtypes. May raise for a wrong state.
        note: called on the coordinator with the folder that is about to be made, and that a kill would leave.
        process_group: the ranks that save; all by default.
        timeout: as for ``save``.

    Example:
        >>> import tempfile, torch
        >>> report = run_preflight({"weights": torch.ones(1000)}, tempfile.mkdtemp(), kept=3)
        >>> report.tensor_count, report.problems
        (1, ())
        >>> print(report)
        preflight for ...: all is well
          a checkpoint has ... KB in 1 tensors, and ... of them fit into the ... that are free
        ...
          estimate: committed after ... s; training pauses for ...
    """
    how = SaveSetup(kept, async_save, writer, copies, checked_size("memory_budget", memory_budget))
    # Not the path: if it differs between ranks, that is one of the problems to be reported.
    rank, world_size = own_place(process_group)
    with Call("preflight", getattr(root, "location", root), rank=rank, world_size=world_size) as event:
        with meeting(f"the preflight of holdfast with {how}", process_group, timeout=timeout, progress=event) as ranks:
            report = _Preflight(root, how, options, ranks, note).run(state, stored_bytes)
        event.detail["problems"] = [str(problem) for problem in report.problems]
        if report.problems:
            raise PreflightError(f"{report}\nNothing was saved.", problems=report.problems, report=report)
    return report


class _Preflight:
    """A preflight on one rank. A rank that has a problem goes on, so that other problems are found too."""

    def __init__(
        self,
        root: str | os.PathLike[str] | Root,
        how: SaveSetup,
        options: Callable[[], CheckedOptions],
        ranks: Collectives,
        note: Callable[[str], None],
    ) -> None:
        self._given = root
        self._how = how
        self._options = options
        self._ranks = ranks
        self._note = note
        self._found = PreflightFindings()

    def run(self, state: Any, stored_bytes: Callable[[], int]) -> PreflightReport:
        """All checks, one after the other, on all ranks at the same time."""
        ranks = self._ranks
        token = ranks.broadcast("begin", self._begin)
        with ranks.step("look"):
            captured = self._look(state)
        probe = self._open(token)
        self._look_at_what_is_stored(stored_bytes)
        try:
            wrote = ranks.all_gather("write", lambda: self._write(probe))
            writers = [rank for rank, succeeded in enumerate(wrote) if succeeded]
            with ranks.step("see"):
                self._see(probe, writers)
            with ranks.step("measure"):
                self._measure(probe, captured)
            with ranks.step("start"):  # by itself: while processes start on some ranks, others would measure too little
                self._start_writer()
        finally:
            self._delete(probe)
        ranks.barrier()  # a folder can be removed when all ranks have deleted what they wrote
        if probe is not None:
            with suppress(OSError):
                probe.forget()
        return ranks.all_reduce("report", lambda: self._found, lambda found: report_of(found, self._how))

    def _begin(self) -> str:
        token = uuid.uuid4().hex[:12]
        self._note(folder_of_probe(token))
        return token

    def _look(self, state: Any) -> Captured | None:
        began = time.perf_counter()
        try:
            captured = look_at(state, self._options(), self._ranks.rank, self._ranks.world_size)
            self._found.share = share_of(captured)
        except Exception as error:
            self._add_problem("state", f"the state cannot be saved: {_text(error)}")
            return None
        self._found.look_seconds = time.perf_counter() - began
        return captured

    def _open(self, token: str) -> Probe | None:
        try:
            root = root_at(self._given)
            self._found.location = root.location
            self._found.free = root.free_bytes()
            return Probe(root, token, self._ranks.rank)
        except Exception as error:
            self._found.location = self._found.location or repr(self._given)
            self._add_problem("path", f"there is no place for checkpoints at {self._found.location}: {_text(error)}")
            return None

    def _look_at_what_is_stored(self, stored_bytes: Callable[[], int]) -> None:
        if not self._ranks.is_coordinator:
            return
        try:
            self._found.stored_bytes = stored_bytes()
        except Exception as error:
            self._add_problem("path", f"checkpoints at {self._found.location} cannot be listed: {_text(error)}")

    def _write(self, probe: Probe | None) -> bool:
        """Whether this rank could write."""
        if probe is None:
            return False
        doing = "written"
        try:
            probe.write()
            self._found.wrote = True
            if self._ranks.is_coordinator:
                doing = "committed"
                probe.commit()
        except Exception as error:
            self._add_problem(
                "write",
                f"at {self._found.location} a small object could not be {doing}: {_text(error)}. Check who "
                "owns the folder, who may write to it, and whether it is mounted read-only.",
            )
        return self._found.wrote

    def _see(self, probe: Probe | None, writers: Sequence[int]) -> None:
        if probe is not None:
            self._found.seen = probe.seen(writers)

    def _measure(self, probe: Probe | None, captured: Captured | None) -> None:
        self._found.limits = memory_limits()
        if captured is not None and self._how.async_save:
            self._found.copy_rate = measure_copies(_tensors_of(captured), patience=_PATIENCE)
        if probe is not None and self._found.wrote:
            try:
                self._found.speed = self._measure_writes(probe)
            except OSError as error:
                self._add_problem("write", f"writing to {self._found.location} fails: {_text(error)}")

    def _measure_writes(self, probe: Probe) -> WriteSpeed:
        # All ranks write at once, and a disk that is nearly full must not be filled by looking at it.
        most = None if self._found.free is None else self._found.free // (8 * self._ranks.world_size)
        return measure_writes(probe.store, name_of_measured(self._ranks.rank), patience=_PATIENCE, most=most)

    def _start_writer(self) -> None:
        if not self._how.async_save or self._how.writer != "process":
            return
        if self._is_in_memory():
            text = f"{self._found.location} is in the memory of this process, where a writer process cannot save to"
            self._add_problem("writer", f"{text}. Use writer='thread', or a path.")
            return
        began = time.perf_counter()
        try:
            request = SaveRequest(_do_nothing, {}, None, 0, None, 0, asdict(settings.current()))
            with idle_writer() as writer:
                writer.save(pack_request(request, find_main_script()), None, "nowhere, as a test")
        except Exception as error:
            self._add_problem("writer", f"the writer process does not start: {_text(error)}. Use writer='thread'.")
            return
        self._found.writer_seconds = time.perf_counter() - began

    def _is_in_memory(self) -> bool:
        try:
            return isinstance(root_at(self._given).store, MemoryStore)
        except Exception:  # was reported when it was opened
            return False

    def _delete(self, probe: Probe | None) -> None:
        if probe is None:
            return
        try:
            probe.delete()
        except OSError as error:
            if self._found.wrote:
                self._add_problem(
                    "write", f"what was written to {self._found.location} cannot be deleted: {_text(error)}"
                )

    def _add_problem(self, check: Check, text: str) -> None:
        where = "" if self._ranks.world_size == 1 else f"rank {self._ranks.rank}: "
        self._found.problems.append(Problem(check, (self._ranks.rank,), where + text))


def _tensors_of(captured: Captured) -> Iterator[torch.Tensor]:
    """Those of this rank, as they are in the memory of some device."""
    for local in captured.local.values():
        value = local_part(local.value) if is_dtensor(local.value) else local.value
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta:
            yield value


def _do_nothing(ranks: Collectives, state: dict[str, Any], call: Call | None) -> None:
    """What the writer process is asked for."""


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
