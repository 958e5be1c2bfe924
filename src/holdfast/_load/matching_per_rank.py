"""Matches places where every rank has a value of its own, in the state or in the checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast._formats.native.refs import PerRankValues, TensorRef
from holdfast._formats.native.trees import hides_tensor, mapped
from holdfast._formats.native.values import Path, key_of
from holdfast._load.applying import Chosen, Kept, Outcome, Own
from holdfast._load.stored_nodes import StoredNode
from holdfast._load.targets import takes_anything
from holdfast._state.expanding import adapter_for
from holdfast._state.per_rank import PerRank
from holdfast.errors import WorldSizeError

if TYPE_CHECKING:
    from holdfast._load.matching import Matcher


def match_per_rank(matcher: Matcher, target: Any, rule: PerRank, stored: StoredNode | None, path: Path) -> Outcome:
    """Match a place that the state marks as per rank."""
    key = key_of(path)
    if not matcher.options.wanted(key):
        matcher.leave(key, stored, target)
        return Kept(target)
    if stored is None:
        matcher.found.missing[key] = None
        return Kept(target)
    if stored.is_per_rank:
        return _match_values(matcher, target, rule, stored, path)
    if rule.on_resize != "first":
        reason = (
            "is one value for all ranks in the checkpoint and per rank in the state; "
            "holdfast.PerRank(value, on_resize='first') takes it for every rank"
        )
        matcher.refuse(key, stored, reason, target)
        return Kept(target)
    return Own(target, rule, _match_own(matcher, rule.value, stored, path))


def _match_values(matcher: Matcher, target: Any, rule: PerRank, stored: StoredNode, path: Path) -> Outcome:
    """Match a place that is per rank on both sides."""
    key = key_of(path)
    children = list(stored.children.values())
    try:
        sources = rule.sources(key, len(children), matcher.rank, matcher.world_size)
    except WorldSizeError as error:
        stored.take()
        matcher.found.errors[key] = error
        return Kept(target)
    if not rule.needs_values(len(children), matcher.world_size):
        own = children[sources[0]]
        outcome = Own(target, rule, _match_own(matcher, rule.value, own, path))
        matcher.found.unexpected.extend(below for below, leaf in matcher.keys_below(own, path) if not leaf.taken)
        stored.take()
        return outcome
    stored.take()
    with matcher.in_own_value():
        outcomes = [matcher.take(children[source], (*path, source)) for source in sources]
    adapter = adapter_for(rule.value, path, matcher.context)
    if adapter is not None:
        matcher.found.adapters.append((key, adapter))
    return Chosen(target, rule, outcomes, len(children), matcher.rank, matcher.world_size, adapter)


def _match_own(matcher: Matcher, value: Any, stored: StoredNode, path: Path) -> Outcome:
    """Match this rank's own value with that of one rank."""
    adapter = adapter_for(value, path, matcher.context)
    with matcher.in_own_value():
        if adapter is not None:
            return matcher.match_live(value, adapter, stored, path)
        return matcher.match(value, stored, path)


def match_unmarked(matcher: Matcher, target: Any, stored: StoredNode, path: Path) -> Outcome:
    """Match a place where every rank stored a value of its own, and which the state does not mark so."""
    key = key_of(path)
    if not matcher.options.wanted(key):
        return matcher.leave(key, stored, target)
    if not takes_anything(target):
        reason = "is stored per rank; mark it in the state as well: holdfast.PerRank(value)"
        return matcher.refuse(key, stored, reason, target)
    return matcher.take(stored, path)


def of_this_rank(matcher: Matcher, value: Any, path: Path) -> Any:
    """A stored value with this rank's own where every rank has one."""
    if not isinstance(value, PerRankValues):
        if not hides_tensor(value) or isinstance(value, TensorRef):
            return value
        return mapped(value, lambda child: of_this_rank(matcher, child, path))
    saved, current = len(value.ranks), matcher.world_size
    if saved == current:
        return value.ranks[matcher.rank]
    key = key_of(path)
    matcher.found.errors[key] = WorldSizeError(
        f"'{key}' is, or contains, what was stored per rank by {saved} ranks, and is loaded by {current}. Mark it "
        "in the state and say what the ranks should get: holdfast.PerRank(value, on_resize='first'), or a function",
        key=key,
        saved=saved,
        current=current,
    )
    return None
