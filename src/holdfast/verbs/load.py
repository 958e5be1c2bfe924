"""``holdfast.load``: look at the checkpoint on every rank, match it with the state, agree, read, put in place."""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import xxhash

from holdfast.boxes import volume
from holdfast.checkpoint import Checkpoint
from holdfast.coordination.meeting import meeting
from holdfast.errors import CheckpointException, HoldfastError, IncompleteLoadError, RankDisagreementError
from holdfast.formats.native.keys import readable
from holdfast.load_report import LoadReport
from holdfast.patterns import Pattern, Patterns, dotted
from holdfast.sources.detect import open_source
from holdfast.sources.renaming import rename as renamed_tree
from holdfast.sources.source import Source
from holdfast.sources.stored_nodes import StoredNode
from holdfast.stores.store import Store
from holdfast.verbs.filling import check_regions, hole_in, put, read_regions, regions_of
from holdfast.verbs.findings import Fill, Findings, Rules
from holdfast.verbs.load_options import Options, Rename, Transforms
from holdfast.verbs.matching import Matcher
from holdfast.verbs.outcomes import Outcome
from holdfast.verbs.problems import Problems
from holdfast.verbs.shared_memory import Write, conflicts, once_each, settle_missing_names
from holdfast.verbs.targets import held_elements
from holdfast.verbs.transforming import make

if TYPE_CHECKING:
    import torch.distributed as dist

    from holdfast.coordination.collectives import Collectives

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
    verify: bool | Literal["first"] = True,
    allow_pickle: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load a checkpoint into a state, in place. With a process group all its ranks call this together.

    The state may be laid out over any number of ranks in any way, whatever it was like when it was saved. Nothing of it
    is changed before all ranks know that everything fits; what does not fit is told all at once.

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
        verify: compare the digests of all that is read. ``"first"`` does so before anything is changed, at the cost of
            reading twice.
        allow_pickle: load values that were stored as pickles, which can run any code.
        process_group: the ranks that load. All by default.

    Returns:
        What was done, the same on all ranks.

    Example:
        >>> import tempfile, torch
        >>> import holdfast as hf
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> saved = hf.save({"model": torch.nn.Linear(4, 2), "step": 100}, path)
        >>> state = {"model": torch.nn.Linear(4, 2), "step": 0}
        >>> report = hf.load(state, path)
        >>> state["step"], report.read
        (100, ['model.weight', 'model.bias', 'step'])
    """
    started = time.perf_counter()
    with meeting(f"holdfast.load from {_told(path)}, verify={verify!r}", process_group) as ranks:
        options = ranks.all_gather_status(
            "options",
            lambda: Options.of(
                strict=strict,
                allow_missing=allow_missing,
                allow_unexpected=allow_unexpected,
                include=include,
                exclude=exclude,
                rename=rename,
                cast=cast,
                transform=transform,
                verify=verify,
            ),
        )
        run = _Load(state, ranks, options)
        with run.look(lambda: open_source(path, allow_pickle=allow_pickle)) as source:
            outcome = run.plan(source)
            run.read(source)
            run.put_in_place(outcome)
            report = run.report(source, started)
    logger.info("%s", report)
    return report


class _Proposal(NamedTuple):
    """What one rank tells the others about its part."""

    problems: Problems
    unexpected: Sequence[str]
    not_requested: Sequence[str]
    has_loads: bool
    has_other_keys: bool


class _Load:
    """One load. Its methods are the steps, in the order in which they happen."""

    def __init__(self, state: Any, ranks: Collectives, options: Options) -> None:
        self.state = state
        self.ranks = ranks
        self.options = options
        self.found = Findings()
        self.uncovered: dict[str, str] = {}
        self.writes: list[Write] = []
        self.expected = 0
        """Elements that this rank has to write."""
        self.unexpected: Sequence[str] = ()
        self.not_requested: Sequence[str] = ()
        self.nbytes = 0
        self.elements = 0

    def look(self, opened: Callable[[], Source]) -> Source:
        """Open the checkpoint on every rank, and make sure that all see the same."""
        source = self.ranks.all_gather_status("open", opened)
        views = dict(enumerate(self.ranks.all_gather_object(f"{source.format} {source.identity}")))
        if len(set(views.values())) > 1:
            source.close()
            raise RankDisagreementError(
                f"the ranks look at different checkpoints: {views}. Wait until a running save has finished and all "
                "ranks see the same files, then load again.",
                views=views,
            )
        return source

    def plan(self, source: Source) -> Outcome:
        """Match the checkpoint with the state; raises on all ranks if it does not fit on one of them."""
        outcome, proposal = self.ranks.all_gather_status("plan", lambda: self._match(source))
        problems, self.unexpected, self.not_requested = self.ranks.all_reduce(
            "agree", lambda: _sent_once(self.ranks, proposal), self._agree
        )
        problems.raise_if_any(source.location)
        return outcome

    def read(self, source: Source) -> None:
        """Read what this rank needs, straight into the tensors where that is possible."""
        regions = [write.region for write in self.writes if write.made is None]
        if self.options.verify == "first":
            with _remark("Nothing was changed."):
                self.ranks.all_gather_status("verify", lambda: check_regions(regions, source))

        def read() -> None:
            self.nbytes, self.elements = read_regions(regions, source, verify=bool(self.options.verify))
            for write in self.writes:
                if write.made is not None:
                    put(write.region.memory, write.made)
                    self.elements += volume(write.region.box.sizes)
            if self.elements != self.expected:
                raise IncompleteLoadError(
                    f"{self.elements} elements were loaded from {source.location} where the state has {self.expected}. "
                    "This is a mistake of Holdfast; please report it.",
                    expected=self.expected,
                    found=self.elements,
                )

        with _remark(_PARTLY_LOADED):
            self.ranks.all_gather_status("read", read)

    def put_in_place(self, outcome: Outcome) -> None:
        """Replace values, and let live objects take over what was read."""
        with _remark(_PARTLY_LOADED):
            self.ranks.all_gather_status("apply", outcome.finish)

    def report(self, source: Source, started: float) -> LoadReport:
        """What was done by all ranks together."""
        found = self.found
        lists = LoadReport(
            path=source.location,
            format=source.format,
            identity=source.identity,
            read=list(found.read),
            renamed=found.renamed,
            cast=found.cast,
            transformed=[transform.key for transform in found.transforms],
            missing=list(found.missing),
            unexpected=self.unexpected,
            untouched=found.untouched,
            not_requested=self.not_requested,
            notes=[*found.notes, *(note for adapter in found.adapters for note in adapter.notes())],
            world_size=self.ranks.world_size,
        )
        numbers = (self.nbytes, self.elements, time.perf_counter() - started)
        return self.ranks.all_reduce("report", lambda: (_sent_once(self.ranks, lists), numbers), _merged_report)

    def _match(self, source: Source) -> tuple[Outcome, _Proposal]:
        root = StoredNode.of(source.tree)
        keys: dict[str, str] = {}
        if self.options.renaming:
            root, keys = renamed_tree(root, self.options.renaming)
        rules = self._rules()
        matcher = Matcher(self.state, rules)
        outcome = matcher.match_state(self.state, root)
        self.found = found = matcher.found
        found.notes += [f"rename: no stored key is, or begins with, '{name}'" for name in self.options.renaming.unused]
        found.notes += [
            f"transform: no key of the state is meant by '{pattern}'"
            for pattern, is_meant in self.options.transformed
            if not any(is_meant(transform.key) for transform in found.transforms)
        ]
        settle_missing_names(found)
        checkpoint = Checkpoint(source)
        made = [write for transform in found.transforms for write in make(transform, checkpoint, found, rules)]
        self._plan_writes(made, source)
        unexpected, not_requested = self._left_over(root, keys, checkpoint)
        return outcome, self._proposal(unexpected, not_requested, [leaf.key for leaf in root.leaves()])

    def _rules(self) -> Rules:
        return Rules(
            wanted=self.options.selection,
            may_cast=self.options.casts.allow,
            fresh_dtype=self.options.casts.dtype_for,
            transform=self.options.transform,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
        )

    def _plan_writes(self, made: list[Write], source: Source) -> None:
        """List what is to be written. Memory that has several names is written once."""
        writes = [Write(region) for fill in self.found.fills for region in self._regions(fill, source)]
        if not self.uncovered:
            self.found.misfits.update(conflicts([*writes, *made], source))
        self.writes = once_each([*writes, *made])
        self.expected = sum(volume(write.region.box.sizes) for write in self.writes)

    def _regions(self, fill: Fill, source: Source) -> list[Any]:
        regions = regions_of(fill)
        held = held_elements(fill.target)
        planned = sum(volume(region.box.sizes) for region in regions)
        if held is not None and held != planned:
            self.uncovered[fill.key] = f"of the {held} elements on rank {self.ranks.rank}, {planned} would be filled"
        for region in regions:
            hole = hole_in(region, source)
            if hole is not None:
                self.uncovered[fill.key] = hole
        return regions

    def _left_over(
        self, root: StoredNode, new_keys: Mapping[str, str], checkpoint: Checkpoint
    ) -> tuple[list[str], list[str]]:
        """Stored keys that nothing took: below what the state has, and elsewhere."""
        requested = {_first_part(readable((key,))) for key in self.state} if isinstance(self.state, Mapping) else None
        unexpected, not_requested = list(self.found.unexpected), list[str]()
        for leaf in root.leaves():
            key = new_keys.get(leaf.key, leaf.key)
            if leaf.taken or leaf.key in checkpoint.looked_at or not self.options.selection(key):
                continue
            is_asked_for = requested is None or _first_part(key) in requested
            (unexpected if is_asked_for else not_requested).append(leaf.key)
        return unexpected, not_requested

    def _proposal(self, unexpected: list[str], not_requested: list[str], stored_keys: list[str]) -> _Proposal:
        found = self.found
        missing = [key for key in found.missing if not self.options.may_be_missing(key)]
        problems = Problems(
            missing=missing,
            shapes=found.shapes,
            dtypes=found.dtypes,
            kinds=found.misfits,
            uncovered=self.uncovered,
            errors=found.errors,
            stored_keys=stored_keys if missing else [],
        )
        others = bool(found.untouched) or (bool(found.missing) and not self.options.strict)
        return _Proposal(problems, unexpected, not_requested, bool(found.read or found.transforms), others)

    def _agree(self, proposals: list[_Proposal | None]) -> tuple[Problems, list[str], list[str]]:
        """The problems of all ranks. A stored key is unexpected if no rank has a place for it."""
        known = [proposal for proposal in proposals if proposal is not None]
        whole = Problems()
        for proposal in known:
            whole.add(proposal.problems)
        unexpected = _common([proposal.unexpected for proposal in known])
        whole.unexpected = [key for key in unexpected if not self.options.may_be_unexpected(key)]
        if not any(proposal.has_loads for proposal in known) and any(proposal.has_other_keys for proposal in known):
            whole.kinds.setdefault(
                "", "gets nothing from this checkpoint: none of its keys is stored there, or was asked for"
            )
        return whole, unexpected, _common([proposal.not_requested for proposal in known])


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
            elif hasattr(error, "add_note"):
                error.add_note(text)
        raise


def _first_part(key: str) -> str:
    return dotted(key).split(".", 1)[0]


def _sent_once(ranks: Collectives, thing: T) -> T | None:
    """The thing; None if a lower rank has an equal one, so that it need not be sent again."""
    digests = ranks.all_gather_object(xxhash.xxh3_128_digest(pickle.dumps(thing)))
    return thing if digests.index(digests[ranks.rank]) == ranks.rank else None


def _common(lists: Sequence[Sequence[str]]) -> list[str]:
    everywhere = set(lists[0]).intersection(*lists[1:])
    return [key for key in lists[0] if key in everywhere]


def _merged_report(parts: list[tuple[LoadReport | None, tuple[int, int, float]]]) -> LoadReport:
    reports = [report for report, _ in parts if report is not None]
    return LoadReport.merged(
        reports,
        bytes_read=sum(nbytes for _, (nbytes, _, _) in parts),
        elements=sum(elements for _, (_, elements, _) in parts),
        seconds=max(seconds for _, (_, _, seconds) in parts),
    )


def _told(path: str | os.PathLike[str] | Store) -> str:
    return path.location if isinstance(path, Store) else os.fsdecode(path)
