"""What ranks have under the same names: whether it is the same everywhere, and if not, who has what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from holdfast._base.texts import listed, quoted_key
from holdfast.errors import ReplicaMismatchError

Name = TypeVar("Name")
Content = TypeVar("Content")


class Differing(NamedTuple):
    """A key under which ranks hold different things, with the ranks grouped by what they hold."""

    key: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def who(self) -> str:
        """The groups in words."""
        return " != ".join(f"ranks {named_ranks(group)}" for group in self.groups[:4])

    def __str__(self) -> str:
        return f"{quoted_key(self.key)}: {self.who}"


def differing(seen: Iterable[tuple[Name, int, Content]]) -> dict[Name, dict[Content, list[int]]]:
    """Names under which ranks, in ascending order, have seen different contents: who has seen which.

    >>> differing([("a", 0, "x"), ("b", 0, "x"), ("a", 1, "y"), ("b", 1, "x"), ("a", 2, "x")])
    {'a': {'x': [0, 2], 'y': [1]}}
    """
    by_name: dict[Name, dict[Content, list[int]]] = {}
    for name, rank, content in seen:
        contents = by_name.get(name)
        if contents is None:
            by_name[name] = {content: [rank]}
        elif content not in contents:
            contents[content] = [rank]
        elif contents[content][-1] != rank:
            contents[content].append(rank)
    return {name: contents for name, contents in by_name.items() if len(contents) > 1}


def named_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: the first of them, and how many there are.

    >>> named_ranks([0, 2]), named_ranks(range(20))
    ('0,2', '0,1,2,3,4,5,6,7,… (20 in all)')
    """
    shown = ",".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown},… ({len(ranks)} in all)"


def describe_differing(differing: Sequence[Differing], advice: str) -> str:
    """A message about keys whose copies differ."""
    headline = f"Ranks hold different values under {len(differing)} key(s), of which only one can be stored:"
    return "\n".join([headline, *listed(list(map(str, differing))), advice])


def refuse_differing(differing: Sequence[Differing], advice: str) -> None:
    """Raise if there are keys whose copies differ."""
    if differing:
        raise ReplicaMismatchError(
            describe_differing(differing, f"Nothing was saved. {advice}"), keys={one.key: one.who for one in differing}
        )


def refuse_different_kinds(kinds: Mapping[str, Mapping[str, Sequence[int]]], advice: str) -> None:
    """Raise if there are keys of different kinds of things, each of which is given in words and with its ranks."""
    if kinds:
        texts = {
            key: "; ".join(f"{kind} on ranks {named_ranks(ranks)}" for kind, ranks in by_kind.items())
            for key, by_kind in kinds.items()
        }
        lines = listed([f"{quoted_key(key)}: {text}" for key, text in texts.items()])
        raise ReplicaMismatchError(
            "\n".join(
                [
                    "One key stands for different kinds of things on different ranks:",
                    *lines,
                    f"Nothing was saved. {advice}",
                ]
            ),
            keys=texts,
        )
