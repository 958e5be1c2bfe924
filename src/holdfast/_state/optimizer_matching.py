"""Which stored parameter of an optimizer is which live one, and whose settings each parameter group takes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast._base.texts import some_of
from holdfast._formats.native.refs import ANYTHING
from holdfast.errors import OptimizerMismatchError

Name = str | int
"""Of a parameter: its name in a model, or else its number in the optimizer."""


@dataclass(frozen=True)
class Match:
    """How stored parameters and groups map to live ones. Live parameters and groups are numbered."""

    parameters: Mapping[Name, int]
    groups: Sequence[int | None]
    """For each live group, the stored group whose settings it takes; None keeps its own."""
    notes: list[str] = field(default_factory=list)
    regrouped: list[str] = field(default_factory=list)
    """Where parameters are grouped in another way now."""


def match(live: list[list[Name]], stored_groups: Sequence[Mapping[str, Any]]) -> Match:
    """Find every live parameter among the stored ones: by name, by name without wrappers, or else by position."""
    stored = [list(group.get("params", ())) for group in stored_groups]
    notes: list[str] = []
    parameters = _match_parameters(live, stored, notes)
    groups = _match_groups(live, stored_groups, stored, parameters)
    return Match(parameters, groups, notes, _regrouped(live, stored, parameters))


def is_optimizer_state(value: Any) -> bool:
    """Whether it is made like the state dicts of ``torch.optim``."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), list)
        and all(isinstance(group, Mapping) and "params" in group for group in value["param_groups"])
    )


def refuse_state_without_group(state: Iterable[Any], known: Container[Any], live: Iterable[Name]) -> None:
    """Raise if there is state for parameters that no stored group has. It would belong to nothing."""
    strays = sorted(set(state) & {name for name in live if isinstance(name, str) and name not in known})
    if strays:
        raise OptimizerMismatchError(
            f"The stored optimizer has state for {some_of(strays)}, but none of its groups has them. "
            "Something has renamed one and not the other; use rename={stored: wanted} with keys of the model",
            problems=[f"{name}: state, but no group" for name in strays],
        )


def take_settings(
    live: Sequence[Mapping[str, Any]], loaded: Sequence[Mapping[str, Any]], matched: Match
) -> list[dict[str, Any]]:
    """The live groups with the loaded settings. Settings that were not stored stay."""
    groups = []
    for group, source in zip(live, matched.groups, strict=True):
        settings = {} if source is None else without_anything(loaded[source])
        groups.append({**group, **{key: settings[key] for key in settings if key not in ("params", "param_names")}})
    return groups


def without_anything(entry: Any) -> Any:
    """A loaded dict without what was not stored after all."""
    if not isinstance(entry, Mapping):
        return entry
    return {key: value for key, value in entry.items() if value is not ANYTHING}


def _match_parameters(live: list[list[Name]], stored: list[list[Name]], notes: list[str]) -> dict[Name, int]:
    ours = {name: number for number, name in enumerate(_flat(live))}
    theirs = _flat(stored)
    if not ours or not theirs:
        return {}
    if all(isinstance(name, int) for name in ours) or all(isinstance(name, int) for name in theirs):
        return _by_position(live, stored, notes)
    found = {name: ours[name] for name in theirs if name in ours}
    if found:
        return found
    bare = {_bare(name): number for name, number in ours.items()}
    if len(bare) == len(ours) and len({_bare(name) for name in theirs}) == len(theirs):
        found = {name: bare[_bare(name)] for name in theirs if _bare(name) in bare}
    if found:
        notes.append("optimizer: parameters were matched by their names without wrappers such as 'module.'")
    return found


def _by_position(live: list[list[Name]], stored: list[list[Name]], notes: list[str]) -> dict[Name, int]:
    counts, stored_counts = [len(group) for group in live], [len(group) for group in stored]
    if counts != stored_counts:
        raise OptimizerMismatchError(
            f"The stored optimizer has groups of {stored_counts} parameters and this one has groups of {counts}. "
            "One of them knows its parameters only by number, so they cannot be told apart. Put the model into the "
            "state beside its optimizer, when saving and when loading: then they have names",
            problems=[f"parameters per group: stored {stored_counts}, here {counts}"],
        )
    if _flat(live) != _flat(stored):
        notes.append("optimizer: parameters were matched by position, since only one side knows their names")
    return {name: number for number, name in enumerate(_flat(stored))}


def _match_groups(
    live: list[list[Name]],
    stored_groups: Sequence[Mapping[str, Any]],
    stored: list[list[Name]],
    parameters: Mapping[Name, int],
) -> list[int | None]:
    group_of = {parameters[name]: index for index, names in enumerate(stored) for name in names if name in parameters}
    sources: list[int | None] = []
    problems: list[str] = []
    for index, (names, numbers) in enumerate(zip(live, _numbered(live), strict=True)):
        candidates = sorted({group_of[number] for number in numbers if number in group_of})
        if not candidates and not names and index < len(stored) and not stored[index]:
            candidates = [index]  # both empty: nothing but the position decides
        for other in candidates[1:]:
            different = _different(stored_groups[candidates[0]], stored_groups[other])
            if different:
                problems.append(
                    f"group {index} has parameters of the stored groups {candidates[0]} and {other}, which differ in "
                    + ", ".join(map(repr, different))
                )
        sources.append(candidates[0] if candidates else None)
    if problems:
        raise OptimizerMismatchError(
            "The optimizer's parameter groups cannot take over the stored settings: "
            + "; ".join(problems)
            + ". Group the parameters as they were when they were saved",
            problems=problems,
        )
    return sources


def _regrouped(live: list[list[Name]], stored: list[list[Name]], parameters: Mapping[Name, int]) -> list[str]:
    """Groups that were put together or divided since. One of the settings would replace others then."""
    group_of = {number: index for index, numbers in enumerate(_numbered(live)) for number in numbers}
    goes: dict[int, set[int]] = {}
    comes: dict[int, set[int]] = {}
    for index, names in enumerate(stored):
        for name in names:
            if name in parameters:
                group = group_of[parameters[name]]
                goes.setdefault(index, set()).add(group)
                comes.setdefault(group, set()).add(index)
    divided = [
        f"the parameters of its group {index} are in {len(groups)} groups here: {_in_order(groups)}"
        for index, groups in goes.items()
        if len(groups) > 1
    ]
    joined = [
        f"the parameters of its groups {_in_order(indexes)} are in one group here: {group}"
        for group, indexes in comes.items()
        if len(indexes) > 1
    ]
    return divided + joined


def _numbered(live: list[list[Name]]) -> Iterator[range]:
    begin = 0
    for names in live:
        yield range(begin, begin + len(names))
        begin += len(names)


def _in_order(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _different(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    keys = [key for key in [*one, *(key for key in other if key not in one)] if key not in ("params", "param_names")]
    return [key for key in keys if key not in one or key not in other or one[key] != other[key]]


def _bare(name: Name) -> Name:
    from holdfast._state.parameter_names import strip_wrapper_names  # needs torch, which comparing checkpoints does not

    return strip_wrapper_names(name) if isinstance(name, str) else name


def _flat(groups: list[list[Name]]) -> list[Name]:
    return [name for group in groups for name in group]
