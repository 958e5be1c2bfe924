"""What does not fit between a checkpoint and a state, over all keys and ranks, told at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from holdfast.errors import StateMismatchError
from holdfast.formats.native.refs import TensorRef
from holdfast.planning.load_problems import near_misses
from holdfast.sources.source import Source
from holdfast.verbs.filling import Region, regions_of
from holdfast.verbs.matching import Fill, Outcome

_MOST_SHOWN = 30


@dataclass
class Problems:
    """What one rank found wrong."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    uncovered: dict[str, str] = field(default_factory=dict)
    stored_keys: list[str] = field(default_factory=list)

    @classmethod
    def merged(cls, all_ranks: Sequence[Problems], unexpected: Sequence[str]) -> Problems:
        """The problems of all ranks, each once."""
        whole = cls(unexpected=[key for key in unexpected if key in all_ranks[0].unexpected])
        for problems in all_ranks:
            whole.missing.extend(key for key in problems.missing if key not in set(whole.missing))
            whole.shapes.update(problems.shapes)
            whole.dtypes.update(problems.dtypes)
            whole.kinds.update(problems.kinds)
            whole.uncovered.update(problems.uncovered)
            whole.stored_keys = whole.stored_keys or problems.stored_keys
        return whole

    def take_made(self, key: str, target: Any, made: Any, into: list[tuple[Region, Any]]) -> None:
        """Check what a function made for a key, and keep the parts of it that this rank holds."""
        if isinstance(target, Outcome):
            target.value = made  # type: ignore[attr-defined]
            return
        elements = torch.as_tensor(made) if isinstance(made, (np.ndarray, torch.Tensor)) else None
        if elements is None:
            self.kinds[key] = f"is a tensor, and its transform made a {type(made).__name__}"
            return
        shape, dtype = tuple(target.shape), str(target.dtype).removeprefix("torch.")
        if tuple(elements.shape) != shape:
            self.shapes[key] = (tuple(elements.shape), shape)
            return
        found = str(elements.dtype).removeprefix("torch.")
        if found != dtype:
            self.dtypes[key] = (found, dtype)
            return
        for region in regions_of(Fill(key, _made_ref(key), target)):
            part = elements[
                tuple(slice(at, at + size) for at, size in zip(region.box.offsets, region.box.sizes, strict=True))
            ]
            into.append((region, part.clone() if part.numel() < elements.numel() else part))

    def raise_if_any(self, source: Source, world_size: int) -> None:
        """Raise if there are problems."""
        lines = self._lines()
        if not lines:
            return
        shown = [f"  {line}" for line in lines[:_MOST_SHOWN]]
        if len(lines) > _MOST_SHOWN:
            shown.append(f"  … and {len(lines) - _MOST_SHOWN} more")
        raise StateMismatchError(
            "\n".join(
                [
                    f"{source.location} does not fit the state to load into ({len(lines)} problem(s)):",
                    *shown,
                    f"Nothing was changed. {self._advice()}".rstrip(),
                ]
            ),
            missing=self.missing,
            unexpected=self.unexpected,
            shapes=self.shapes,
            dtypes=self.dtypes,
            kinds=self.kinds,
            uncovered=self.uncovered,
        )

    def _lines(self) -> list[str]:
        near = near_misses(self.missing, self.stored_keys)
        return [
            *(f"'{key}' is missing in the checkpoint{near.get(key, '')}" for key in self.missing),
            *(f"'{key}' is in the checkpoint and has no place in the state" for key in self.unexpected),
            *(
                f"'{key}' has shape {list(saved)} in the checkpoint and {list(current)} in the state"
                for key, (saved, current) in self.shapes.items()
            ),
            *(
                f"'{key}' is {saved} in the checkpoint and {current} in the state"
                for key, (saved, current) in self.dtypes.items()
            ),
            *(f"'{key}' {text}" for key, text in self.kinds.items()),
            *(f"'{key}': {text}" for key, text in self.uncovered.items()),
        ]

    def _advice(self) -> str:
        advice = []
        if self.missing:
            advice.append("allow_missing=[...] leaves such keys as they are; rename={stored: wanted} finds them.")
        if self.unexpected:
            advice.append("allow_unexpected=[...] passes such keys over.")
        if self.dtypes:
            advice.append("cast=True, or cast=[patterns], allows conversions.")
        return " ".join(advice)


def _made_ref(key: str) -> TensorRef:
    from holdfast.formats.native.dtypes import dtype_named

    return TensorRef(key, dtype_named("uint8"), ())
