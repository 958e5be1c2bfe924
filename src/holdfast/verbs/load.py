"""``holdfast.load``: look at the checkpoint on every rank, match it with the state, agree, read, put in place."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from holdfast.boxes import volume
from holdfast.checkpoint import Checkpoint
from holdfast.coordination.meeting import meeting
from holdfast.errors import CheckpointException, HoldfastError, RankDisagreementError
from holdfast.load_report import LoadReport
from holdfast.patterns import Choice, Chooser, Pattern, Patterns, Selection, chooser
from holdfast.planning.holdings import memory_of
from holdfast.sources.detect import open_source
from holdfast.sources.source import Source
from holdfast.sources.stored_nodes import StoredNode
from holdfast.sources.stored_nodes import rename as renamed_tree
from holdfast.stores.store import Store
from holdfast.verbs.capturing import torch_dtype
from holdfast.verbs.filling import Region, check_regions, hole_in, memory_problem, put, read_regions, regions_of
from holdfast.verbs.matching import Fill, Findings, Matcher, Outcome, Rules
from holdfast.verbs.problems import Problems

if TYPE_CHECKING:
    import torch.distributed as dist

    from holdfast.coordination.collectives import Collectives

logger = logging.getLogger(__name__)

Rename: TypeAlias = "Mapping[str, str] | Mapping[re.Pattern[str], str] | Callable[[str], str | None]"
Transform: TypeAlias = "Mapping[Pattern, Callable[[Checkpoint, str], Any]]"


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
    transform: Transform | None = None,
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
        rename: from stored keys to keys of the state: a mapping of keys, a mapping of regular expressions to
            replacements, or a function.
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
    with meeting(f"holdfast.load from {_told(path)}", process_group) as ranks:
        selection = Selection(include, exclude)
        options = _Options(
            selection=selection,
            may_be_missing=chooser(allow_missing, otherwise=False) if strict else _always,
            may_be_unexpected=chooser(allow_unexpected, otherwise=False) if strict else _always,
            casts=_Casts(cast),
            new_name=_namer(rename),
            transform=Choice(transform),
            verify=verify,
        )
        run = _Load(state, ranks, options)
        source = run.look(lambda: open_source(path, allow_pickle=allow_pickle))
        with source:
            outcome = run.plan(source)
            run.read(source)
            run.put_in_place(outcome)
            report = run.report(source, started)
    logger.info("%s", report)
    return report


@dataclass(frozen=True)
class _Options:
    selection: Selection
    may_be_missing: Callable[[str], bool]
    may_be_unexpected: Callable[[str], bool]
    casts: _Casts
    new_name: Callable[[str], str | None] | None
    transform: Choice
    verify: bool | Literal["first"]


class _Load:
    """One load. Its methods are the steps, in the order in which they happen."""

    def __init__(self, state: Any, ranks: Collectives, options: _Options) -> None:
        self.state = state
        self.ranks = ranks
        self.options = options
        self.found = Findings()
        self.problems = Problems()
        self.regions: list[Region] = []
        self.made: list[tuple[Region, Any]] = []
        self.unexpected: list[str] = []
        self.not_requested: list[str] = []
        self.renamed: dict[str, str] = {}
        self.nbytes = 0
        self.elements = 0

    def look(self, opened: Callable[[], Source]) -> Source:
        """Open the checkpoint on every rank, and make sure that all see the same."""
        source = self.ranks.all_gather_status("open", opened)
        views = dict(enumerate(self.ranks.all_gather_object(f"{source.format} {source.identity}")))
        if len(set(views.values())) > 1:
            raise RankDisagreementError(
                f"the ranks look at different checkpoints: {views}. Wait until a running save has finished and all "
                "ranks see the same files, then load again.",
                views=views,
            )
        return source

    def plan(self, source: Source) -> Outcome:
        """Match the checkpoint with the state; raises on all ranks if it does not fit on one of them."""
        outcome = self.ranks.all_gather_status("plan", lambda: self._match(source))
        everyone: list[Problems] = self.ranks.all_gather_object(self.problems)
        self._agree_on_unexpected(everyone)
        merged = Problems.merged(everyone, self.unexpected)
        merged.raise_if_any(source, self.ranks.world_size)
        return outcome

    def read(self, source: Source) -> None:
        """Read what this rank needs, straight into the tensors where that is possible."""

        def read() -> None:
            self.nbytes, self.elements = read_regions(self.regions, source, verify=bool(self.options.verify))
            for region, elements in self.made:
                put(region.memory, elements)
                self.elements += volume(region.box.sizes)

        if self.options.verify == "first":
            # A step of its own: no rank changes anything before all ranks have found everything undamaged.
            self.ranks.all_gather_status("verify", lambda: check_regions(self.regions, source))
        try:
            self.ranks.all_gather_status("read", read)
        except CheckpointException as error:
            for cause, _ in error.failures.values():
                if isinstance(cause, HoldfastError):
                    cause.message += " The state is partly loaded now and must not be used."
            raise

    def put_in_place(self, outcome: Outcome) -> None:
        """Replace values, and let live objects take over what was read."""
        finished = self.ranks.all_gather_status("apply", outcome.finish)
        if finished is not self.state:
            raise AssertionError("the state was to be changed in place")

    def report(self, source: Source, started: float) -> LoadReport:
        """What was done by all ranks together."""
        found = self.found
        mine = LoadReport(
            path=source.location,
            format=source.format,
            identity=source.identity,
            read=list(found.read),
            renamed={**self.renamed, **found.renamed},
            cast=found.cast,
            transformed=[key for key, _, _ in found.transforms],
            missing=found.missing,
            unexpected=self.unexpected,
            untouched=found.untouched,
            not_requested=self.not_requested,
            notes=[note for adapter in found.adapters for note in adapter.notes()],
            bytes_read=self.nbytes,
            elements=self.elements,
            seconds=time.perf_counter() - started,
            world_size=self.ranks.world_size,
        )
        return _merged_report(self.ranks.all_gather_object(mine))

    def _match(self, source: Source) -> Outcome:
        root = StoredNode.of(source.tree)
        if self.options.new_name is not None:
            root, self.renamed = renamed_tree(root, self.options.new_name)
        matcher = Matcher(self.state, self._rules())
        outcome = matcher.match(self.state, root, ())
        self.found = matcher.found
        checkpoint = Checkpoint(source)
        self._plan_regions(source)
        self._make(checkpoint)
        self._look_for_unexpected(root, checkpoint)
        self._note_problems([leaf.key for leaf in root.leaves()])
        return outcome

    def _rules(self) -> Rules:
        return Rules(
            wanted=self.options.selection,
            may_cast=self.options.casts.allow,
            fresh_dtype=self.options.casts.dtype_for,
            transform=self.options.transform,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
        )

    def _plan_regions(self, source: Source) -> None:
        """List what is to be read. Memory that has several names is filled once."""
        known: dict[Any, Fill] = {}
        for fill in self.found.fills:
            memory = memory_of(fill.target)
            first = known.setdefault(memory, fill) if memory is not None else fill
            if first is not fill and first.ref.key == fill.ref.key:
                continue
            if first is not fill and not _are_equal(first.ref.key, fill.ref.key, source):
                self.problems.kinds[fill.key] = (
                    f"is tied to '{first.key}' in the state, and the checkpoint has different tensors for the two"
                )
            if first is not fill:
                continue
            for region in regions_of(fill):
                problem = memory_problem(region)
                if problem is not None:
                    self.problems.kinds[fill.key] = problem
                hole = hole_in(region, source)
                if hole is not None:
                    self.problems.uncovered[fill.key] = hole
                self.regions.append(region)

    def _make(self, checkpoint: Checkpoint) -> None:
        """Let the user's functions make what they make, and keep this rank's part of it."""
        for key, target, function in self.found.transforms:
            made = function(checkpoint, key)
            self.problems.take_made(key, target, made, self.made)

    def _look_for_unexpected(self, root: StoredNode, checkpoint: Checkpoint) -> None:
        requested = {key.split(".", 1)[0] for key in _keys_of_state(self.state, self.found)}
        everything = not isinstance(self.state, dict)
        for leaf in root.leaves():
            if leaf.taken or leaf.key in checkpoint.looked_at:
                continue
            key = self.renamed.get(leaf.key, leaf.key)
            if not self.options.selection(key):
                continue
            if everything or key.split(".", 1)[0] in requested:
                self.unexpected.append(leaf.key)
            else:
                self.not_requested.append(leaf.key)

    def _note_problems(self, stored_keys: list[str]) -> None:
        found, problems = self.found, self.problems
        problems.missing = [key for key in found.missing if not self.options.may_be_missing(key)]
        problems.stored_keys = stored_keys if problems.missing else []
        problems.unexpected = self.unexpected
        problems.shapes.update(found.shapes)
        problems.dtypes.update(found.dtypes)
        problems.kinds.update(found.kinds)

    def _agree_on_unexpected(self, everyone: list[Problems]) -> None:
        """A stored key is unexpected if no rank has a place for it."""
        common = set.intersection(*(set(problems.unexpected) for problems in everyone))
        self.unexpected = [key for key in self.unexpected if key in common]
        for problems in everyone:
            problems.unexpected = [
                key for key in problems.unexpected if key in common and not self.options.may_be_unexpected(key)
            ]


class _Casts:
    """Which changes of dtype are allowed."""

    def __init__(self, cast: bool | Patterns | Mapping[Pattern, Any]) -> None:
        self._dtypes = Choice(None)
        self._allowed: Callable[[str], bool] = _always if cast is True else _never
        if isinstance(cast, Mapping):
            self._dtypes = Choice({pattern: torch_dtype(wish) for pattern, wish in cast.items()})
        elif not isinstance(cast, bool):
            self._allowed = Chooser(cast)

    def allow(self, key: str, stored: str, current: str) -> bool:
        """Whether a tensor may become of another type."""
        wish = self._dtypes(key)
        return self._allowed(key) or (wish is not None and str(wish).removeprefix("torch.") == current)

    def dtype_for(self, key: str) -> Any:
        """The type for a tensor that has no memory yet; None for the stored one."""
        return self._dtypes(key)


def _namer(rename: Rename | None) -> Callable[[str], str | None] | None:
    if rename is None:
        return None
    if callable(rename):
        return rename
    texts = {old: new for old, new in rename.items() if isinstance(old, str)}
    expressions = [(old, new) for old, new in rename.items() if isinstance(old, re.Pattern)]
    prefixes = sorted(texts, key=len, reverse=True)

    def new_name(key: str) -> str | None:
        for old in prefixes:
            if key == old or key.startswith(f"{old}."):
                return texts[old] + key[len(old) :]
        for pattern, new in expressions:
            if pattern.search(key):
                return pattern.sub(new, key)
        return None

    return new_name


def _are_equal(one: str, other: str, source: Source) -> bool:
    checkpoint = Checkpoint(source)
    first, second = checkpoint[one], checkpoint[other]
    return bool(first.shape == second.shape and first.raw().tobytes() == second.raw().tobytes())


def _keys_of_state(state: Any, found: Findings) -> list[str]:
    if isinstance(state, dict):
        return [str(key) for key in state]
    return [*found.read, *found.missing, *found.untouched]


def _merged_report(reports: list[LoadReport]) -> LoadReport:
    def union(name: str) -> Any:
        return list(dict.fromkeys(key for report in reports for key in getattr(report, name)))

    def joined(name: str) -> Any:
        return {key: value for report in reversed(reports) for key, value in getattr(report, name).items()}

    first = reports[0]
    not_requested = [key for key in first.not_requested if all(key in set(other.not_requested) for other in reports)]
    return LoadReport(
        path=first.path,
        format=first.format,
        identity=first.identity,
        read=union("read"),
        renamed=joined("renamed"),
        cast=joined("cast"),
        transformed=union("transformed"),
        missing=union("missing"),
        unexpected=union("unexpected"),
        untouched=union("untouched"),
        not_requested=not_requested,
        notes=union("notes"),
        bytes_read=sum(report.bytes_read for report in reports),
        elements=sum(report.elements for report in reports),
        seconds=max(report.seconds for report in reports),
        world_size=first.world_size,
    )


def _told(path: str | os.PathLike[str] | Store) -> str:
    return path.location if isinstance(path, Store) else os.fsdecode(path)


def _always(key: str) -> bool:
    return True


def _never(key: str) -> bool:
    return False
