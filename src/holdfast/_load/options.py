"""What the caller of a load wants and allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from holdfast._base.arguments import Size, check_choice, checked_budget
from holdfast._base.patterns import Choice, Chooser, Pattern, Patterns, Rename, Renaming, Selection, chooser
from holdfast._formats.native.torch_elements import dtype_from_user
from holdfast._settings import OnFinding

if TYPE_CHECKING:
    import torch.distributed as dist

    from holdfast._load.checkpoint import Checkpoint

ShareReads: TypeAlias = Literal["auto", "job", "machine", "off"]
"""For whom each stored byte is read once: for the job, for each machine, or (off) for each rank that wants it."""

Transforms: TypeAlias = "Mapping[Pattern, Callable[[Checkpoint, str], Any]]"


@dataclass(frozen=True)
class LoadOptions:
    """The arguments of ``load``, as answers to the questions that come up on the way."""

    wanted: Selection
    """Which keys of the state are to be loaded."""
    strict: bool
    """Whether missing and unexpected keys are errors, unless they are allowed."""
    may_be_missing: Callable[[str], bool]
    """Which keys of the state the checkpoint need not have."""
    may_be_unexpected: Callable[[str], bool]
    """Which stored keys the state need not have a place for."""
    casts: AllowedCasts
    """Which tensors may change their dtype."""
    renaming: Renaming
    """From stored keys to keys of the state."""
    transform: Choice
    """The function that makes what belongs to a key of the state; None for what is simply read."""
    transform_patterns: Sequence[tuple[str, Chooser]]
    """For which keys there are functions: the patterns as text, and what they mean."""
    verify: bool
    """Whether digests are compared while reading."""
    verify_first: bool
    """Whether they are also compared before anything is changed."""
    memory_budget: int | None
    """How many bytes may be allocated beside the state."""
    optimizer_mismatch: OnFinding = "error"
    """What to do about an optimizer that is of another kind, or grouped in another way, than the stored one."""
    share_reads: ShareReads = "off"
    """Whether ranks read for each other."""
    transfer_group: dist.ProcessGroup | None = None
    """Over what they send each other the bytes; None for their own connection."""

    @classmethod
    def of(
        cls,
        *,
        strict: bool,
        allow_missing: Patterns | None,
        allow_unexpected: Patterns | None,
        include: Patterns | None,
        exclude: Patterns | None,
        rename: Rename | None,
        cast: bool | Patterns | Mapping[Pattern, Any],
        transform: Transforms | None,
        verify: bool,
        verify_first: bool,
        memory_budget: Size | None,
        optimizer_mismatch: OnFinding = "error",
        share_reads: ShareReads = "off",
        transfer_group: dist.ProcessGroup | None = None,
    ) -> LoadOptions:
        """The arguments of ``load``, checked."""
        check_choice("verify", verify, (True, False))
        check_choice("verify_first", verify_first, (True, False))
        if verify_first and not verify:
            raise ValueError("verify_first=True compares digests, and verify=False asks for none: drop one of them")
        check_choice("optimizer_mismatch", optimizer_mismatch, get_args(OnFinding))
        check_choice("share_reads", share_reads, get_args(ShareReads))
        if transform is not None and not isinstance(transform, Mapping):
            raise TypeError(f"transform takes keys of the state with a function for each, not {transform!r}")
        return cls(
            wanted=Selection(include, exclude),
            strict=strict,
            may_be_missing=chooser(allow_missing, otherwise=False) if strict else _always,
            may_be_unexpected=chooser(allow_unexpected, otherwise=False) if strict else _always,
            casts=AllowedCasts(cast),
            renaming=Renaming(rename),
            transform=Choice(transform),
            transform_patterns=[(str(pattern), Chooser(pattern)) for pattern in transform or ()],
            verify=verify,
            verify_first=verify_first,
            memory_budget=checked_budget(memory_budget),
            optimizer_mismatch=optimizer_mismatch,
            share_reads=share_reads,
            transfer_group=transfer_group,
        )


class AllowedCasts:
    """Which changes of dtype are allowed.

    >>> casts = AllowedCasts({"model.*": "bfloat16"})
    >>> casts.allow("model.weight", "bfloat16"), casts.allow("model.weight", "float16"), casts.allow("x", "bfloat16")
    (True, False, False)
    """

    def __init__(self, cast: bool | Patterns | Mapping[Pattern, Any]) -> None:
        self._dtypes = Choice(None)
        self._allowed: Callable[[str], bool] = _always if cast is True else _never
        if isinstance(cast, Mapping):
            self._dtypes = Choice({pattern: dtype_from_user(wish) for pattern, wish in cast.items()})
        elif not isinstance(cast, bool):
            self._allowed = Chooser(cast)

    def allow(self, key: str, current: str) -> bool:
        """Whether stored elements may become of the type that the state has."""
        wish = self._dtypes(key)
        return self._allowed(key) or (wish is not None and str(wish).removeprefix("torch.") == current)

    def dtype_for(self, key: str) -> Any:
        """The type for a tensor that has no memory yet; None for the stored one."""
        return self._dtypes(key)


def _always(key: str) -> bool:
    return True


def _never(key: str) -> bool:
    return False
