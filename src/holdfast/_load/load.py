"""``holdfast.load``: look at the checkpoint on every rank, match it with the state, agree, read, put in place."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from holdfast._background.copy_jobs import finish_copies
from holdfast._background.futures import warn_of_unseen_failures
from holdfast._background.queues import Claim, wait_for_conflicting_saves
from holdfast._base.arguments import Size
from holdfast._base.boxes import volume
from holdfast._base.byte_counts import counting_bytes
from holdfast._base.garbage import no_garbage_collection
from holdfast._base.notices import add_note, warn_caller
from holdfast._base.patterns import Pattern, Patterns, Rename
from holdfast._formats.native.record import repairs_in
from holdfast._formats.source import Source
from holdfast._load.agreement import (
    ADVICE,
    Accord,
    LoadAgreement,
    LoadTerms,
    Proposal,
    RankReport,
    agree,
    decided,
    refuse_different_checkpoints,
)
from holdfast._load.filling import put
from holdfast._load.opening import open_source
from holdfast._load.options import LoadOptions, ShareReads, Transforms
from holdfast._load.planning import RankPlan, plan_load
from holdfast._load.read_division import ReadDivision, ReadResult, ReadTerms, divide_reading
from holdfast._load.report import KEY_LISTS, LoadReport
from holdfast._ranks.meeting import meeting, own_place
from holdfast._settings import OnFinding
from holdfast._stores.network_disks import is_far
from holdfast._stores.places import in_messages
from holdfast._stores.store import Store
from holdfast._watching.calls import Call, Phase
from holdfast.errors import CheckpointException, HoldfastError, IncompleteLoadError

if TYPE_CHECKING:
    import torch.distributed as dist

    from holdfast._ranks.shared_steps import Collectives


def load(
    state: Any,
    path: str | os.PathLike[str] | Store,
    *,
    strict: bool = True,
    allow_missing: Patterns | None = None,
    allow_unexpected: Patterns | None = None,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Rename | None = None,
    cast: bool | Patterns | Mapping[Pattern, Any] = False,
    transform: Transforms | None = None,
    optimizer_mismatch: OnFinding = "error",
    verify: bool = True,
    verify_first: bool = False,
    allow_pickle: bool = False,
    memory_budget: Size | None = None,
    share_reads: ShareReads = "auto",
    transfer_group: dist.ProcessGroup | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> LoadReport:
    """Load a checkpoint into a state, in place. With a process group all its ranks call this together.

    The state may be laid out over any number of ranks in any way, whatever it was like when it was saved. Nothing of it
    is changed before all ranks know that everything fits; all mismatches are raised in one error.

    Args:
        state: what to load into, as for ``save``. Tensors are filled where they are, values in dicts and lists are
            replaced, live objects get their ``load_state_dict`` called. An empty dict or list, and None, take whatever
            is stored at their place.
        path: a checkpoint of Holdfast or of ``torch.distributed.checkpoint``, a safetensors file or folder, or a file
            of ``torch.save``. Which one it is, is found out.
        strict: False lets keys be missing and unexpected without saying which.
        allow_missing: keys of the state that the checkpoint need not have. They stay as they are.
        allow_unexpected: stored keys that the state need not have a place for. Stored keys whose first part (up to the
            first dot) is not in the state are never an error: to load the model alone, give only the model.
        include: which keys to load; all by default.
        exclude: which of these not to load.
        rename: from stored keys to keys of the state: a mapping of keys (or of what they begin with, up to a dot), a
            mapping of regular expressions to replacements, or a function.
        cast: which keys may change their dtype: True for all, patterns, or a mapping of patterns to the new dtype.
            Without it another dtype is an error.
        transform: keys of the state and functions ``f(checkpoint, key)`` that make the tensor or value for them out of
            the opened checkpoint, for instance by joining several stored tensors.
        optimizer_mismatch: what to do if a stored optimizer is of another class than that in the state, or has its
            parameters in other groups: "error", "warn", or "ignore", which only notes it in the report.
        verify: compare the digests of all that is read. Safetensors files have no digests, and files of torch none for
            parts of what a rank saved.
        verify_first: compare them before anything is changed, at the cost of reading twice.
        allow_pickle: load values that were stored as pickles, which can run any code.
        memory_budget: bytes that each rank may allocate beside the state, for buffers and conversions: 256 KiB at
            least, 64 MiB by default. More does not make it faster.
        share_reads: for whom each stored byte is read once. The rank that reads it checks its digest, and sends it to
            the others that need it. "job": for all ranks. "machine": for the ranks of each machine, or each 32 of them.
            "off": every rank reads what it needs. "auto" is "job" for object stores and network file systems, and
            "off" for disks of the machine, where the page cache has what another rank has read.
        transfer_group: a process group of all ranks that load, with a faster backend than the ranks' own connection,
            to send those bytes over.
        process_group: the ranks that load. All by default.
        timeout: as for ``save``.

    Returns:
        What was done, the same on all ranks.

    Example:
        >>> import tempfile, torch
        >>> import holdfast
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> saved = holdfast.save({"model": torch.nn.Linear(4, 2), "step": 100}, path)
        >>> state = {"model": torch.nn.Linear(4, 2), "step": 0}
        >>> report = holdfast.load(state, path)
        >>> state["step"], report.read
        (100, ['model.weight', 'model.bias', 'step'])
    """
    started = time.perf_counter()
    place = in_messages(path)
    warn_of_unseen_failures()
    wait_for_conflicting_saves(Claim(place))
    finish_copies()  # of what is going to be overwritten
    rank, world_size = own_place(process_group)
    asked = f"holdfast.load from {place}, verify={verify!r}, verify_first={verify_first!r}, share_reads={share_reads!r}"
    with (
        Call("load", place, rank=rank, world_size=world_size, started=started) as call,
        counting_bytes(call.advance),
        meeting(asked, process_group, timeout=timeout, progress=call, compare_later=True) as ranks,
        ExitStack() as stack,
    ):
        with call.phase("plan"), no_garbage_collection():
            opened: list[_Load] = []

            def look() -> LoadTerms:
                options = LoadOptions.of(
                    strict=strict,
                    allow_missing=allow_missing,
                    allow_unexpected=allow_unexpected,
                    include=include,
                    exclude=exclude,
                    rename=rename,
                    cast=cast,
                    transform=transform,
                    verify=verify,
                    verify_first=verify_first,
                    memory_budget=memory_budget,
                    optimizer_mismatch=optimizer_mismatch,
                    share_reads=share_reads,
                    transfer_group=transfer_group,
                )
                source = stack.enter_context(open_source(path, allow_pickle=allow_pickle))
                opened.append(_Load(ranks, options, source, call))
                return LoadTerms.of(source, ReadTerms.of(options, is_far=is_far(path)))

            terms = ranks.combine("open", look, LoadTerms.joined)
            run = opened[0]
            if not terms.same_checkpoint:
                refuse_different_checkpoints(ranks, run.source)
            plan, agreement = run.match(state)
            division = divide_reading(ranks, plan, run.source, run.options, terms.reading)
        reading, read = run.read(plan, division)
        report = run.apply(plan, agreement, reading, read, started)
        call.nbytes, call.slowest_rank = report.bytes_read, report.slowest_rank
        call.detail["keys"] = len(report.read)
    return report


@dataclass(frozen=True)
class _Load:
    """One load. Its methods are the steps, in the order in which they happen."""

    ranks: Collectives
    options: LoadOptions
    source: Source
    call: Call

    def match(self, state: Any) -> tuple[RankPlan, LoadAgreement]:
        """Find out what is to be read into the state. Nothing is changed; what does not fit is raised on all ranks."""
        planned: list[tuple[RankPlan, Proposal]] = []

        def propose() -> Accord:
            plan = plan_load(state, self.source, self.options, rank=self.ranks.rank, world_size=self.ranks.world_size)
            proposal = Proposal.of(plan, self.options)
            planned.append((plan, proposal))
            return Accord.of(plan, proposal)

        accord = self.ranks.combine("plan", propose, Accord.joined)
        ((plan, proposal),) = planned
        agreement = decided([proposal], self.options) if accord.on_proposal else agree(self.ranks, plan, self.options)
        agreement.problems.raise_if_any(self.source.location, ADVICE)
        for key, adapter in plan.found.adapters:
            for warning in adapter.warnings():
                warn_caller(f"'{key}': {warning}. It is loaded all the same, as optimizer_mismatch='warn' wants it.")
        for key in sorted(agreement.settled & set(plan.found.missing)):
            plan.found.settle(key)
        return plan, agreement._replace(same_keys=bool(accord.on_keys))

    def read(self, plan: RankPlan, division: ReadDivision) -> tuple[Phase, ReadResult]:
        """Read what this rank needs, straight into the tensors where that is possible; returns how that went."""
        options = self.options
        if options.verify_first:
            with _remark("Nothing was changed."), self.ranks.step("verify"), self.call.phase("verify"):
                division.check(options.memory_budget)
        with _remark(_PARTLY_LOADED), self.ranks.step("read"), self.call.phase("read") as reading:
            shared = self.ranks.world_size > 1
            read = division.read(verify=options.verify, memory=options.memory_budget, shared=shared)
            reading.nbytes, elements = read.bytes_read, read.elements
            for region in plan.writes:
                if region.made is not None:
                    put(region.memory, region.made)
                    elements += volume(region.box.sizes)
            if elements != plan.elements:
                raise IncompleteLoadError(
                    f"{elements} elements were loaded from {self.source.location} where the state has "
                    f"{plan.elements}. This is a bug in Holdfast; please report it.",
                    expected=plan.elements,
                    found=elements,
                )
        return reading, read

    def apply(
        self, plan: RankPlan, agreement: LoadAgreement, reading: Phase, read: ReadResult, started: float
    ) -> LoadReport:
        """Replace values, let live objects take over what was read, and put together what all ranks did."""
        keys = self._keys(plan, agreement)

        def finish() -> RankReport:
            with self.call.phase("apply"):
                plan.outcome.finish()
            # What all ranks know of each other need not travel.
            own = LoadReport(keys.path, keys.format, keys.identity, []) if agreement.same_keys else keys
            own = replace(
                own,
                **self._remarks(plan),
                bytes_read=read.bytes_read,
                bytes_received=read.bytes_received,
                elements=plan.elements,
                seconds=time.perf_counter() - started,
                world_size=self.ranks.world_size,
            )
            return RankReport(own, (reading.seconds, -self.ranks.rank))

        with _remark(_PARTLY_LOADED):
            report = self.ranks.combine("apply", finish, RankReport.joined, last=True).report
        if agreement.same_keys:
            report = replace(report, **{name: getattr(keys, name) for name in KEY_LISTS})
        return report

    def _keys(self, plan: RankPlan, agreement: LoadAgreement) -> LoadReport:
        """What becomes of the keys of this rank's state."""
        found = plan.found
        return LoadReport(
            path=self.source.location,
            format=self.source.format,
            identity=self.source.identity,
            read=list(found.read),
            renamed=found.renamed,
            cast=found.cast,
            transformed=[transform.key for transform in found.transforms],
            missing=list(found.missing),
            unexpected=agreement.unexpected,
            untouched=found.untouched,
            not_requested=agreement.not_requested,
        )

    def _remarks(self, plan: RankPlan) -> dict[str, Any]:
        """What is to be said of the objects that were loaded."""
        adapters = plan.found.adapters
        return {
            "notes": [
                *map(str, repairs_in(self.source.provenance)),
                *plan.found.notes,
                *(note for _, adapter in adapters for note in adapter.notes()),
            ],
            "changed_settings": {
                f"{key}.{name}" if key else name: change
                for key, adapter in adapters
                for name, change in adapter.changes().items()
            },
        }


_PARTLY_LOADED = "The state is partly loaded now and must not be used."


@contextmanager
def _remark(text: str) -> Iterator[None]:
    """Have errors of the step inside say what has become of the state."""
    try:
        yield
    except CheckpointException as step:
        for error, _ in step.failures.values():
            if isinstance(error, HoldfastError):
                error.message = f"{error.message} {text}"
            else:
                add_note(error, text)
        raise
