"""Elements of one floating point type as another, without a need for torch, and which tensors are to have which."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast._base.patterns import Chooser, Pattern
from holdfast._formats.native.dtypes import DType, dtype_named, name_of
from holdfast._formats.native.refs import TensorRef
from holdfast.errors import MissingPackageError

# Elements of one floating point type as another, bit by bit as torch makes them, without a need for torch.
#
# NaN stays NaN; which of the many bit patterns of that comes out is not even the same within torch.
# numpy has no bfloat16, so that it is made of float32 by hand. Types that numpy lacks otherwise go through torch.


Array = npt.NDArray[Any]

WITHOUT_TORCH = frozenset({"float16", "bfloat16", "float32", "float64"})
FLOATS = WITHOUT_TORCH | {
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
}
"""Types that are cast. Two numbers share an element of float4, which torch does not convert either."""

_BFLOAT16_NAN = 0x7FC0
_AT_ONCE = 1 << 16
"""Elements that go through all steps before the next ones do: the processor's cache holds what is made of them."""


def cast_elements(elements: Array, stored: DType, dtype: DType) -> Array:
    """Carriers of one type as carriers of another, in new memory or, if the types are the same, as they are.

    >>> ones = np.ones(2, np.float32).view("<u4")
    >>> [hex(bits) for bits in cast_elements(ones, dtype_named("float32"), dtype_named("bfloat16"))]
    ['0x3f80', '0x3f80']
    """
    if stored == dtype:
        return elements
    if not {stored.name, dtype.name} <= WITHOUT_TORCH:
        return _by_torch(elements, stored, dtype)
    numbers = _numbers(elements, stored)
    if dtype.name == "bfloat16":
        return _to_bfloat16(numbers)
    with np.errstate(all="ignore"):  # what is too large becomes infinite, as it does in torch
        if dtype.name == "float16":
            numbers = numbers.astype(np.float32, copy=False)  # torch rounds twice, too
        return numbers.astype(dtype.numpy).view(dtype.carrier)


def floating_dtype(wish: object) -> DType:
    """The type that a user names to cast floating point tensors to.

    >>> floating_dtype("bfloat16").name
    'bfloat16'
    """
    name = name_of(wish)
    if name not in FLOATS:
        raise ValueError(
            f"tensors are cast from one floating point type to another, and {wish!r} is not one of "
            f"{', '.join(sorted(FLOATS))}"
        )
    return dtype_named(name)


def _numbers(elements: Array, stored: DType) -> Array:
    if stored.name == "bfloat16":
        wide: Array = np.left_shift(elements.astype("<u4"), 16).view("<f4")
        return wide
    assert stored.numpy is not None
    return elements.view(stored.numpy)


def _to_bfloat16(numbers: Array) -> Array:
    """Round to the nearest, to even ones in the middle. All NaN become the same one."""
    rounded = np.empty(numbers.shape, "<u2")
    for begin in range(0, len(numbers), _AT_ONCE):
        with np.errstate(all="ignore"):
            part = numbers[begin : begin + _AT_ONCE].astype("<f4", copy=False)
        bits = part.view("<u4")
        sums = bits >> np.uint32(16)
        sums &= np.uint32(1)
        sums += np.uint32(0x7FFF)
        sums += bits
        into = rounded[begin : begin + _AT_ONCE]
        into[:] = sums.view("<u2")[1::2]  # the upper halves
        is_none = np.isnan(part)
        if is_none.any():
            into[is_none] = _BFLOAT16_NAN
    return rounded


def _by_torch(elements: Array, stored: DType, dtype: DType) -> Array:
    try:
        from holdfast._formats.native.torch_elements import as_array, as_tensor, torch_dtype
    except ImportError as error:
        raise MissingPackageError(
            f"a cast from {stored} to {dtype} needs torch, which is not installed. Cast to one of "
            f"{', '.join(sorted(WITHOUT_TORCH))}, or install torch",
            install="torch",
        ) from error
    before, after = torch_dtype(stored), torch_dtype(dtype)
    assert before is not None
    assert after is not None
    tensor = as_tensor(elements, before)
    assert tensor is not None
    return as_array(tensor.to(after))


# Which tensors are to have another type, as users say it: one type for all, or types by patterns of names.


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
        options = [(pattern, Chooser([pattern]), floating_dtype(wish)) for pattern, wish in given.items()]
        chosen: dict[str, tuple[str, DType]] = {}
        used: set[int] = set()
        for name, ref in leaves:
            if not _can_be_cast(ref):
                continue
            position = next((at for at, (_, is_meant, _) in enumerate(options) if is_meant(name)), None)
            if position is None:
                continue
            used.add(position)
            dtype = options[position][2]
            other, first = chosen.setdefault(ref.key, (name, dtype))
            if first != dtype:
                raise ValueError(
                    f"'{other}' and '{name}' are one tensor, and cast gives it two types, {first} and {dtype}. Give "
                    "the same for both names."
                )
        unused = [_text(pattern) for at, (pattern, _, _) in enumerate(options) if at not in used]
        return cls({key: dtype for key, (_, dtype) in chosen.items()}, unused if isinstance(cast, Mapping) else [])


def _can_be_cast(ref: Any) -> bool:
    # A wish such as "all of the model" is about weights, and must not take away a counter's or a mask's meaning.
    return isinstance(ref, TensorRef) and ref.dtype.name in FLOATS and ref.numpy is None


def _text(pattern: Pattern) -> str:
    if isinstance(pattern, str):
        return pattern
    return pattern.pattern if isinstance(pattern, re.Pattern) else getattr(pattern, "__name__", repr(pattern))
