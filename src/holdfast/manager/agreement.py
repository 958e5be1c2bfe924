"""Whether all ranks have made their manager alike: otherwise some would wait for others that do not come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.errors import RankDisagreementError

Options = Mapping[str, str]
"""The arguments of a manager that must be the same on all ranks, as texts."""


def refuse_different_options(place: str, ranks: Sequence[Options]) -> None:
    """Raise if the ranks were given different options, and tell only what differs.

    >>> refuse_different_options("runs/a", [{"every_steps": "10", "writer": "x"}, {"every_steps": "20", "writer": "x"}])
    Traceback (most recent call last):
    holdfast.errors.RankDisagreementError: ... different options: {0: 'every_steps=10', 1: 'every_steps=20'}. ...
    """
    names = [name for name in dict.fromkeys(name for each in ranks for name in each) if _differs(name, ranks)]
    if not names:
        return
    views = {rank: ", ".join(f"{name}={each.get(name)}" for name in names) for rank, each in enumerate(ranks)}
    raise RankDisagreementError(
        f"the ranks have managers of {place} with different options: {views}. Give all ranks the same ones: they "
        "save, delete and stop together.",
        views=views,
    )


def _differs(name: str, ranks: Sequence[Options]) -> bool:
    return len({each.get(name) for each in ranks}) > 1
