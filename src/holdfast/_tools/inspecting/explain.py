"""``holdfast.explain``: would this checkpoint load into that state, and if not, why, and what would help."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from holdfast._base.arguments import Size
from holdfast._base.patterns import Pattern, Patterns, Rename, Renaming
from holdfast._formats.native.numpy_types import numpy_dtype_from
from holdfast._formats.native.refs import PerRankValues, TensorRef
from holdfast._formats.native.torch_elements import torch_dtype
from holdfast._formats.native.trees import mapped, refs_in
from holdfast._formats.source import Source
from holdfast._formats.torch_file.reserved_memory import reserved
from holdfast._load.agreement import ADVICE, LoadAgreement, agree
from holdfast._load.checkpoint import Checkpoint, opened, source_of
from holdfast._load.options import AllowedCasts, LoadOptions, Transforms
from holdfast._load.planning import RankPlan, plan_load
from holdfast._ranks.meeting import own_place
from holdfast._ranks.shared_steps import Collectives
from holdfast._settings import OnFinding
from holdfast._state.per_rank import PerRank
from holdfast._stores.store import Store
from holdfast._tools.inspecting.explanation import Explanation
from holdfast._tools.inspecting.hints import Misfits, hints_for
from holdfast.errors import HoldfastError

# A checkpoint as a state to load into: its containers and values, with tensors that take addresses and no memory.


_ALIGNMENT = 64


def template_of(source: Source) -> Any:
    """A state like the one that was saved. Its tensors must not be written to, and hold zeros.

    Per-rank state is what the first rank had, and takes whatever the first of others had.
    """
    tree = _of_one_rank(source.tree)
    memory = _Addresses(
        sum(_aligned(ref.nbytes) for ref in {ref.key: ref for ref in refs_in(_unmarked(tree))}.values())
    )
    return _filled(tree, memory)


def _of_one_rank(tree: Any) -> Any:
    if isinstance(tree, PerRankValues):
        return PerRank(_of_one_rank(tree.ranks[0]), on_resize="first")
    return tree if isinstance(tree, TensorRef) else mapped(tree, _of_one_rank)


def _unmarked(tree: Any) -> Any:
    if isinstance(tree, PerRank):
        return _unmarked(tree.value)
    return tree if isinstance(tree, TensorRef) else mapped(tree, _unmarked)


def _filled(tree: Any, memory: _Addresses) -> Any:
    if isinstance(tree, PerRank):
        return PerRank(_filled(tree.value, memory), on_resize="first")
    if isinstance(tree, TensorRef):
        return memory.tensor(tree)
    return mapped(tree, lambda child: _filled(child, memory))


class _Addresses:
    """A range of addresses without memory behind it, out of which tensors are made. Tied ones are one."""

    def __init__(self, nbytes: int) -> None:
        self._memory = reserved(max(1, nbytes))
        self._used = 0
        self._made: dict[str, Any] = {}

    def tensor(self, ref: TensorRef) -> Any:
        """The tensor, or numpy array, for a stored one."""
        if ref.key not in self._made:
            self._made[ref.key] = self._array(ref) if _is_numpy(ref) else self._tensor(ref)
            self._used += _aligned(ref.nbytes)
        return self._made[ref.key]

    def _array(self, ref: TensorRef) -> Any:
        dtype = ref.dtype.carrier if ref.numpy is None else numpy_dtype_from(ref.numpy)
        return np.ndarray(ref.shape, dtype, self._memory, self._used if ref.nbytes else 0)

    def _tensor(self, ref: TensorRef) -> Any:
        dtype = torch_dtype(ref.dtype)
        assert dtype is not None
        if not ref.nbytes:
            return torch.empty(ref.shape, dtype=dtype, device="cpu")
        flat = torch.frombuffer(self._memory, dtype=torch.uint8, count=ref.nbytes, offset=self._used)
        return flat.view(dtype).reshape(ref.shape)


def _is_numpy(ref: TensorRef) -> bool:
    return ref.numpy is not None or torch_dtype(ref.dtype) is None


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


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
    optimizer_mismatch: OnFinding = "error",
    allow_pickle: bool = False,
    memory_budget: Size | None = None,
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
        >>> import holdfast
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> saved = holdfast.save({"model": {"net.weight": torch.ones(4, 2)}}, path)
        >>> answer = holdfast.explain(path, {"model": {"encoder.weight": torch.zeros(4, 2)}})
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
        verify_first=False,
        memory_budget=memory_budget,
        optimizer_mismatch=optimizer_mismatch,
    )
    with ExitStack() as stack:
        source = source_of(stack.enter_context(opened(path, allow_pickle=allow_pickle)))
        described, state = _state_of(target, stack, allow_pickle)
        asking = _Asking(source, state, options)
        plan, agreement = asking.plan(options)
        return asking.answer(described, plan, agreement, may_rename=not callable(rename), given=rename)


def _state_of(target: Any, stack: ExitStack, allow_pickle: bool) -> tuple[str, Any]:
    """What the target is called, and the state that it is or stands for."""
    if not isinstance(target, (str, os.PathLike, Store, Checkpoint)):
        return "the state", target
    source = source_of(stack.enter_context(opened(target, allow_pickle=allow_pickle)))
    return source.location, template_of(source)


@dataclass(frozen=True)
class _Asking:
    source: Source
    state: Any
    options: LoadOptions

    def plan(self, options: LoadOptions) -> tuple[RankPlan, LoadAgreement]:
        """What a load would do, and what it would refuse."""
        rank, world_size = own_place(None)
        plan = plan_load(self.state, self.source, options, rank=rank, world_size=world_size)
        return plan, agree(Collectives(None, False, 0), plan, options)

    def answer(
        self, target: str, plan: RankPlan, agreement: LoadAgreement, *, may_rename: bool, given: Rename | None
    ) -> Explanation:
        """The answer to the question, with hints if it is no."""
        found, problems = plan.found, agreement.problems
        refusal = ""
        try:
            problems.raise_if_any(self.source.location, ADVICE)
        except HoldfastError as error:
            refusal = error.message
        hints: list[str] = []
        if refusal:
            known = Misfits.of(plan, agreement)
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

    def _without(self, rename: Mapping[str, str] | None, cast: bool, given: Any) -> Misfits | None:
        """What would be found if the caller had asked otherwise; None if that cannot be asked."""
        options = self.options
        if rename is not None:
            options = replace(options, renaming=Renaming({**(given or {}), **rename}))
        if cast:
            options = replace(options, casts=AllowedCasts(True))
        try:
            return Misfits.of(*self.plan(options))
        except (HoldfastError, ValueError, TypeError):
            return None
