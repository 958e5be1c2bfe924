"""``holdfast.explain``: would this checkpoint load into that state, and if not, why, and what would help."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

from holdfast.checkpoint import Checkpoint, opened
from holdfast.coordination.collectives import Collectives
from holdfast.coordination.meeting import own_place
from holdfast.errors import HoldfastError
from holdfast.inspecting.explanation import Explanation
from holdfast.inspecting.hints import Found, hints_for
from holdfast.inspecting.templates import template_of
from holdfast.patterns import Pattern, Patterns
from holdfast.renames import Rename, Renaming
from holdfast.sources.source import Source
from holdfast.stores.store import Store
from holdfast.verbs.load_agreement import Agreement, agree
from holdfast.verbs.load_options import Casts, LoadOptions, Transforms
from holdfast.verbs.load_planning import LoadPlan, plan_load


def explain(
    path: str | os.PathLike[str] | Store | Checkpoint,
    target: Any,
    *,
    strict: bool = True,
    allow_missing: Patterns | None = None,
    allow_unexpected: Patterns | None = None,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Rename | None = None,
    cast: bool | Patterns | Mapping[Pattern, Any] = False,
    transform: Transforms | None = None,
    optimizer_mismatch: Literal["error", "warn", "ignore"] = "error",
    allow_pickle: bool = False,
    memory_budget: int | None = None,
) -> Explanation:
    """Find out whether a checkpoint would load into a state, without changing anything.

    It says the same as ``load`` would, since it makes the same plan, and then looks for what would help: other names,
    conversions, turned shapes. With a process group every rank can ask for itself; nothing is said between ranks.

    Args:
        path: the checkpoint.
        target: a state as for ``load``; or a path, a store or an opened checkpoint, whose keys, shapes and dtypes are
            taken for those of a state.
        strict, allow_missing, allow_unexpected, include, exclude, rename, cast, transform,
            optimizer_mismatch, allow_pickle, memory_budget: as for ``load``.

    Returns:
        The answer. ``explanation.ok`` if it would load.

    Example:
        >>> import tempfile, torch
        >>> import holdfast as hf
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> saved = hf.save({"model": {"net.weight": torch.ones(4, 2)}}, path)
        >>> answer = hf.explain(path, {"model": {"encoder.weight": torch.zeros(4, 2)}})
        >>> answer.ok, answer.missing
        (False, ('model.encoder.weight',))
        >>> print(answer.hints[0])
        rename={'model.net': 'model.encoder'} gives 1 missing key what it needs; then it would load
    """
    options = LoadOptions.of(
        strict=strict,
        allow_missing=allow_missing,
        allow_unexpected=allow_unexpected,
        include=include,
        exclude=exclude,
        rename=rename,
        cast=cast,
        transform=transform,
        verify=True,
        memory_budget=memory_budget,
        optimizer_mismatch=optimizer_mismatch,
    )
    with ExitStack() as stack:
        source = stack.enter_context(opened(path, allow_pickle=allow_pickle)).source
        described, state = _state_of(target, stack, allow_pickle)
        asking = _Asking(source, state, options)
        plan, agreement = asking.plan(options)
        return asking.answer(described, plan, agreement, may_rename=not callable(rename), given=rename)


def _state_of(target: Any, stack: ExitStack, allow_pickle: bool) -> tuple[str, Any]:
    """What the target is called, and the state that it is or stands for."""
    if not isinstance(target, (str, os.PathLike, Store, Checkpoint)):
        return "the state", target
    source = stack.enter_context(opened(target, allow_pickle=allow_pickle)).source
    return source.location, template_of(source)


@dataclass(frozen=True)
class _Asking:
    source: Source
    state: Any
    options: LoadOptions

    def plan(self, options: LoadOptions) -> tuple[LoadPlan, Agreement]:
        """What a load would do, and what it would refuse."""
        rank, world_size = own_place(None)
        plan = plan_load(self.state, self.source, options, rank=rank, world_size=world_size)
        return plan, agree(Collectives(None, False, 0), plan, options)

    def answer(
        self, target: str, plan: LoadPlan, agreement: Agreement, *, may_rename: bool, given: Rename | None
    ) -> Explanation:
        """The answer to the question, with hints if it is no."""
        found, problems = plan.found, agreement.problems
        refusal = ""
        try:
            problems.raise_if_any(self.source.location)
        except HoldfastError as error:
            refusal = error.message
        hints: list[str] = []
        if refusal:
            known = Found.of(plan, agreement)
            hints = hints_for(known, lambda rename, cast: self._without(rename, cast, given), may_rename=may_rename)
        return Explanation(
            path=self.source.location,
            target=target,
            format=self.source.format,
            refusal=refusal,
            read=tuple(found.read),
            missing=tuple(problems.missing),
            unexpected=tuple(problems.unexpected),
            shapes=problems.shapes,
            dtypes=problems.dtypes,
            kinds={**problems.kinds, **{key: error.message for key, error in problems.errors.items()}},
            uncovered=problems.uncovered,
            renamed=found.renamed,
            cast=found.cast,
            transformed=tuple(transform.key for transform in found.transforms),
            left_as_they_are=tuple(key for key in found.missing if key not in problems.missing),
            passed_over=tuple(key for key in agreement.unexpected if key not in problems.unexpected),
            untouched=tuple(found.untouched),
            not_requested=tuple(agreement.not_requested),
            notes=(*found.notes, *(note for _, adapter in found.adapters for note in adapter.notes())),
            hints=tuple(hints),
        )

    def _without(self, rename: Mapping[str, str] | None, cast: bool, given: Any) -> Found | None:
        """What would be found if the caller had asked otherwise; None if that is no way to ask."""
        options = self.options
        if rename is not None:
            options = replace(options, renaming=Renaming({**(given or {}), **rename}))
        if cast:
            options = replace(options, casts=Casts(True))
        try:
            return Found.of(*self.plan(options))
        except (HoldfastError, ValueError, TypeError):
            return None
