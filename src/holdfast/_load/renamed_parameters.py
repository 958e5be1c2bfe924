"""New names for the parameters inside of stored optimizers, so that a part of a model is renamed everywhere.

An optimizer is stored by the names that its parameters have in a model: ``{"state": {name: {…}}, "param_groups":
[{…, "params": [names]}]}``. Those in the groups are values and no keys, so that no renaming of keys reaches them. What
they become follows from the new keys of the model, or else from those of the optimizer's state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast._formats.native.values import key_of
from holdfast._load.stored_nodes import StoredNode
from holdfast._state.flat_optimizer_states import is_flat, split_key

_NAMES = ("params", "param_names")
"""Members of a group that are lists of names."""


@dataclass(frozen=True, slots=True)
class LiveState:
    """What is known of the state that a tree is for."""

    models: Sequence[str] = ()
    """The keys of its models. Names in an optimizer do not begin with them."""
    names: frozenset[str] = frozenset()
    """What the parameters of its optimizers are called."""


NOTHING_KNOWN = LiveState()


@dataclass(frozen=True, slots=True)
class NewKey:
    """What becomes of the key of a leaf."""

    key: str
    """The new one."""
    move: str
    """Where the leaf goes by a change of keys above the parameter's name: the old key, if nothing changes there."""


def with_renamed_parameters(
    root: StoredNode, given: Mapping[str, str], live: LiveState = NOTHING_KNOWN
) -> tuple[StoredNode, dict[str, NewKey]]:
    """Rename parameters in all optimizers of a tree.

    ``given`` has the new keys of leaves, by the old ones. Returns the tree, in which leaves still have their old keys,
    and the new keys of the leaves of the optimizers that were changed.
    """
    keys = [leaf.key for leaf in root.leaves()]
    replaced: dict[int, StoredNode] = {}
    new_keys: dict[str, NewKey] = {}
    for optimizer in _optimizers(root):
        place = optimizer.new_place(given)
        names = {} if place is None else _new_names(optimizer, place, keys, given, live)
        if place is not None and names:
            replaced[id(optimizer.node)] = optimizer.renamed(names)
            new_keys |= optimizer.new_keys(names, place, given)
    return _with_replaced(root, replaced) if replaced else root, new_keys


@dataclass(frozen=True, slots=True)
class _Entry:
    """A leaf of an optimizer that has the name of a parameter in its key."""

    key: str
    part: str
    """``state``, or ``param_groups`` where they are flat."""
    name: str
    rest: str
    """What follows the name in the key, with its dot; empty if nothing does."""


@dataclass(frozen=True, slots=True)
class _Optimizer:
    node: StoredNode
    place: str
    """The key of the node."""
    names: Sequence[str]
    """Of the parameters."""
    entries: Sequence[_Entry]
    is_flat: bool

    def new_place(self, given: Mapping[str, str]) -> str | None:
        """The key that the node gets; None if its parts are torn apart."""
        places = set()
        groups = self.entries if self.is_flat else map(_whole, _leaf_keys(self.node.children["param_groups"]))
        for entry in groups:
            new = given.get(entry.key, entry.key)
            if self.is_flat:
                head, found, _ = f".{new}".partition(f".{entry.part}.")
                places.add(head[1:] if found else None)
            else:
                tail = entry.key[len(self.place) :]
                places.add(new[: -len(tail)] if new.endswith(tail) else None if self.place else "")
        return places.pop() if len(places) == 1 else None

    def names_in_keys(self, place: str, given: Mapping[str, str]) -> dict[str, str]:
        """The names that parameters get by the new keys of the optimizer's own entries."""
        found: dict[str, set[str | None]] = {}
        for entry in self.entries:
            new = given.get(entry.key)
            if new is not None:
                found.setdefault(entry.name, set()).add(_name_in(new, _joined(place, entry.part), entry.rest))
        return {name: new for name, each in found.items() if len(each) == 1 and (new := each.pop()) is not None}

    def renamed(self, names: Mapping[str, str]) -> StoredNode:
        """The node with other names."""
        children = self.node.children
        if self.is_flat:
            changed = {_flat_key(key, names): child for key, child in children.items()}
        else:
            changed = {name: child for name, child in children.items() if name not in ("state", "param_groups")}
            if "state" in children:
                changed["state"] = _with_names(children["state"], names)
            changed["param_groups"] = _with_parameters(children["param_groups"], names)
        return StoredNode.with_children(changed, self.node.path, self.node.like)

    def new_keys(self, names: Mapping[str, str], place: str, given: Mapping[str, str]) -> dict[str, NewKey]:
        """What becomes of the keys of all leaves."""
        entries = {entry.key: entry for entry in self.entries}
        found: dict[str, NewKey] = {}
        for key in _leaf_keys(self.node):
            move = place + key[len(self.place) :] if self.place else _joined(place, key)
            entry = entries.get(key)
            if entry is None:
                found[key] = NewKey(given.get(key, key), given.get(key, key))
                continue
            under, wish = _joined(place, entry.part), given.get(key)
            if wish is None or _name_in(wish, under, entry.rest) is not None:
                found[key] = NewKey(f"{under}.{names.get(entry.name, entry.name)}{entry.rest}", move)
            else:  # it is taken away from its parameter
                found[key] = NewKey(wish, wish)
        return found


def _optimizers(node: StoredNode) -> Iterator[_Optimizer]:
    if node.leaf is not None:
        return
    found = _nested_optimizer(node) or _flat_optimizer(node)
    if found is not None:
        yield found
        return
    for child in node.children.values():
        yield from _optimizers(child)


def _nested_optimizer(node: StoredNode) -> _Optimizer | None:
    groups = node.children.get("param_groups")
    if groups is None or not isinstance(groups.value, list):
        return None
    if not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups.value):
        return None
    names = [name for group in groups.value for name in group["params"] if isinstance(name, str)]
    place, entries = key_of(node.path), []
    state = node.children.get("state")
    if state is not None and state.leaf is None:
        for name, child in state.children.items():
            head = _joined(place, f"state.{name}")
            if isinstance(name, str):
                entries += [
                    _Entry(key, "state", name, key[len(head) :]) for key in _leaf_keys(child) if key.startswith(head)
                ]
    return _Optimizer(node, place, names, entries, is_flat=False)


def _flat_optimizer(node: StoredNode) -> _Optimizer | None:
    if not is_flat(node.children):
        return None
    place, entries = key_of(node.path), []
    for child_key, child in node.children.items():
        part, name, _ = split_key(child_key) or ("", "", "")
        head = _joined(place, f"{part}.{name}")
        entries += [_Entry(key, part, name, key[len(head) :]) for key in _leaf_keys(child) if key.startswith(head)]
    return _Optimizer(node, place, list(dict.fromkeys(entry.name for entry in entries)), entries, is_flat=True)


def _new_names(
    optimizer: _Optimizer, place: str, keys: Sequence[str], given: Mapping[str, str], live: LiveState
) -> dict[str, str]:
    """The new names of parameters, as far as they change."""
    below = _joined(optimizer.place, "") if optimizer.place else ("state.", "param_groups.")
    in_models = _names_in_models(optimizer.names, [key for key in keys if not key.startswith(below)], given, live)
    own = {name: new for name, new in optimizer.names_in_keys(place, given).items() if new != name}
    for name, new in own.items():
        if in_models.get(name, new) != new:
            raise ValueError(
                f"rename gives the parameter '{name}' two names: '{in_models[name]}' by the keys of the model and "
                f"'{new}' by those of the optimizer '{optimizer.place}'. Rename the part of the model alone: its "
                "optimizer follows."
            )
    return in_models | own


def _names_in_models(
    names: Sequence[str], keys: Sequence[str], given: Mapping[str, str], live: LiveState
) -> dict[str, str]:
    """The new names by what becomes of the model that has the parameters, as far as they change."""
    prefixes = _prefixes(frozenset(names), keys)
    most = max(prefixes.values(), default=0)
    there = set(keys)
    found: list[dict[str, str]] = []
    for prefix in sorted((prefix for prefix, count in prefixes.items() if count == most), key=lambda p: p.count(".")):
        old = {name: key for name in names if (key := _joined(prefix, name)) in there}
        new = {name: given.get(key, key) for name, key in old.items()}
        begin = _new_prefix(prefix, new, live.models)
        found.append({name: key[len(begin) :] for name, key in new.items() if key[len(begin) :] != name})
    # Copies of a model, such as an average of it, have the same keys. That one is meant which gives the names that the
    # optimizer has now; if nothing is known of it, the first one that is renamed.
    return max(
        found, key=lambda each: (sum(each.get(name, name) in live.names for name in names), bool(each)), default={}
    )


def _prefixes(names: frozenset[str], keys: Sequence[str]) -> Counter[str]:
    """What may stand before the names in the keys of the model, with how many names each fits, in the keys' order."""
    found: Counter[str] = Counter()
    for key in keys:
        if key in names:
            found[""] += 1
        at = key.find(".")
        while at >= 0:
            if key[at + 1 :] in names:
                found[key[:at]] += 1
            at = key.find(".", at + 1)
    return found


def _new_prefix(prefix: str, new: Mapping[str, str], models: Sequence[str]) -> str:
    """What the names in the optimizer do not begin with, now that the keys of the parameters are others.

    It is the place of the model if one has them all, as ``Context.names_of`` says of live models.
    """
    keys = list(new.values())
    for model in models:
        begin = _joined(model, "") if model else ""
        if all(key.startswith(begin) for key in keys):
            return begin
    if models and all(any(key.startswith(_joined(model, "")) for model in models) for key in keys):
        return ""
    if prefix and all(key.startswith(f"{prefix}.") for key in keys):
        return f"{prefix}."
    heads = {key[: -len(name)] if key.endswith(name) else None for name, key in new.items()}
    if len(heads) == 1 and (head := heads.pop()) is not None:
        return head
    firsts = {key.partition(".")[0] for key in keys}
    return f"{firsts.pop()}." if prefix and len(firsts) == 1 and all("." in key for key in keys) else ""


def _with_names(state: StoredNode, names: Mapping[str, str]) -> StoredNode:
    if state.leaf is not None:
        return state
    children = {names.get(name, name): child for name, child in state.children.items()}
    if len(children) < len(state.children):
        raise ValueError(
            f"rename would give two parameters of '{key_of(state.path)}' one name. Every name can be given once."
        )
    return StoredNode.with_children(children, state.path, state.like)


def _with_parameters(node: StoredNode, names: Mapping[str, str]) -> StoredNode:
    """Groups with other names in their lists of parameters, which may be in a leaf or be leaves."""
    if node.leaf is node:
        made = StoredNode(_with_new(node.value, names, are_names=node.path[-1] in _NAMES), node.path)
        made.key = node.key
        return made
    children = {name: _with_parameters(child, names) for name, child in node.children.items()}
    return StoredNode.with_children(children, node.path, node.like)


def _with_new(value: Any, names: Mapping[str, str], *, are_names: bool = False) -> Any:
    if isinstance(value, list) and are_names:
        return [names.get(name, name) if isinstance(name, str) else name for name in value]
    if isinstance(value, list):
        return [_with_new(each, names) for each in value]
    if isinstance(value, dict):
        return {key: _with_new(each, names, are_names=True) if key in _NAMES else each for key, each in value.items()}
    return value


def _with_replaced(node: StoredNode, replaced: Mapping[int, StoredNode]) -> StoredNode:
    if id(node) in replaced:
        return replaced[id(node)]
    if node.leaf is not None:
        return node
    children = {name: _with_replaced(child, replaced) for name, child in node.children.items()}
    if all(children[name] is child for name, child in node.children.items()):
        return node
    return StoredNode.with_children(children, node.path, node.like)


def _flat_key(key: str, names: Mapping[str, str]) -> str:
    part, name, last = split_key(key) or ("", "", "")
    return f"{part}.{names.get(name, name)}.{last}"


def _name_in(key: str, under: str, rest: str) -> str | None:
    """The name between two parts of a key; None if the key does not have these."""
    begin = f"{under}."
    if not key.startswith(begin) or not key.endswith(rest) or len(key) <= len(begin) + len(rest):
        return None
    return key[len(begin) : len(key) - len(rest)]


def _whole(key: str) -> _Entry:
    return _Entry(key, "param_groups", "", "")


def _leaf_keys(node: StoredNode) -> list[str]:
    return [leaf.key for leaf in node.leaves()]


def _joined(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
