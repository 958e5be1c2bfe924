"""What the caller of a save wants, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from holdfast._base.patterns import Choice, Pattern, Patterns, Selection
from holdfast._base.sizes import checked_budget, checked_bytes
from holdfast._formats.native.torch_elements import floating_dtype_from_user


@dataclass(frozen=True)
class SaveOptions:
    """All of it."""

    selection: Selection
    cast: Choice
    """The dtype to store a key's floating point tensor as."""
    metadata: Mapping[str, Any]
    overwrite: bool
    check_replicas: bool | Literal["warn"]
    allow_pickle: bool
    max_file_size: int | None
    memory_budget: int | None
    is_everything: bool
    """Whether no key is left out."""

    @classmethod
    def of(
        cls,
        *,
        include: Patterns | None,
        exclude: Patterns | None,
        cast: Mapping[Pattern, Any] | None,
        metadata: Mapping[str, Any] | None,
        overwrite: bool,
        check_replicas: bool | Literal["warn"],
        allow_pickle: bool,
        max_file_size: int | None,
        memory_budget: int | None,
    ) -> SaveOptions:
        """The arguments of ``save``, checked."""
        return cls(
            selection=Selection(include, exclude),
            is_everything=include is None and exclude is None,
            cast=_checked_cast(cast),
            metadata=checked_metadata(metadata),
            overwrite=overwrite,
            check_replicas=_checked_replicas(check_replicas),
            allow_pickle=allow_pickle,
            max_file_size=checked_bytes("max_file_size", max_file_size),
            memory_budget=checked_budget(memory_budget),
        )

    def without_patterns(self) -> SaveOptions:
        """For a state that is captured already. Patterns may be functions, which cannot be sent to a process."""
        return replace(self, selection=Selection((), ()), cast=Choice({}))


def checked_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """A user's notes as they will be read. Raises for what JSON cannot hold, or would change.

    >>> checked_metadata({"betas": (0.9, 0.99)})
    {'betas': [0.9, 0.99]}
    """
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a dict, not {metadata!r}")
    try:
        _refuse_keys_that_change(metadata)
        noted: dict[str, Any] = json.loads(json.dumps(dict(metadata or {}), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"metadata must be what JSON can hold: {error}. Put other values into the state.") from error
    return noted


def _refuse_keys_that_change(metadata: Any) -> None:
    """JSON would make texts of other keys, and two of them could become the same."""
    if isinstance(metadata, Mapping):
        for key, value in metadata.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not a text")
            _refuse_keys_that_change(value)
    elif isinstance(metadata, (list, tuple)):
        for value in metadata:
            _refuse_keys_that_change(value)


def _checked_cast(cast: Mapping[Pattern, Any] | None) -> Choice:
    if cast is not None and not isinstance(cast, Mapping):
        raise TypeError(f"cast takes patterns with the dtype for each, such as {{'model.*': 'bfloat16'}}, not {cast!r}")
    return Choice({pattern: floating_dtype_from_user(wish) for pattern, wish in (cast or {}).items()})


def _checked_replicas(check: Any) -> bool | Literal["warn"]:
    if check is True or check is False or check == "warn":
        return check  # type: ignore[no-any-return]
    raise ValueError(f"check_replicas must be True, False or 'warn', not {check!r}")
