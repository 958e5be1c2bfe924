"""Which tensors are to have another type, as users say it: one type for all, or types by patterns of names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from holdfast.converting.casts import FLOATS, floating_dtype
from holdfast.formats.native.dtypes import DType
from holdfast.formats.native.refs import TensorRef
from holdfast.patterns import Chooser, Pattern

Cast: TypeAlias = "Any | Mapping[Pattern, Any]"
"""A floating point type for all tensors that are of one, or types by patterns of keys."""


class Casts(NamedTuple):
    """What was chosen."""

    dtypes: Mapping[str, DType]
    """New types by the keys of references. Tensors that stay as they are may be missing."""
    unused: list[str]
    """Patterns that fit no tensor which can be cast, or none that an earlier pattern does not fit as well."""

    @classmethod
    def of(cls, cast: Cast | None, leaves: Iterable[tuple[str, Any]]) -> Casts:
        """Choose for names and what is stored there. Of tied tensors, any of the names may be meant."""
        if cast is None:
            return cls({}, [])
        given: Mapping[Pattern, Any] = cast if isinstance(cast, Mapping) else {"*": cast}
        wishes = [(pattern, Chooser([pattern]), floating_dtype(wish)) for pattern, wish in given.items()]
        chosen: dict[str, tuple[str, DType]] = {}
        used: set[int] = set()
        for name, ref in leaves:
            if not _can_be_cast(ref):
                continue
            position = next((at for at, (_, is_meant, _) in enumerate(wishes) if is_meant(name)), None)
            if position is None:
                continue
            used.add(position)
            dtype = wishes[position][2]
            other, first = chosen.setdefault(ref.key, (name, dtype))
            if first != dtype:
                raise ValueError(
                    f"'{other}' and '{name}' are one tensor, and cast gives it two types, {first} and {dtype}. Give "
                    "the same for both names."
                )
        unused = [_text(pattern) for at, (pattern, _, _) in enumerate(wishes) if at not in used]
        return cls({key: dtype for key, (_, dtype) in chosen.items()}, unused if isinstance(cast, Mapping) else [])


def _can_be_cast(ref: Any) -> bool:
    # A wish such as "all of the model" is about weights, and must not take away a counter's or a mask's meaning.
    return isinstance(ref, TensorRef) and ref.dtype.name in FLOATS and ref.numpy is None


def _text(pattern: Pattern) -> str:
    if isinstance(pattern, str):
        return pattern
    return pattern.pattern if isinstance(pattern, re.Pattern) else getattr(pattern, "__name__", repr(pattern))
