"""Whether a stored optimizer is of the kind of the live one, and what its settings become.

Native checkpoints note the class of every optimizer. Where it is not known (older ones, other formats), or where one of
the classes is not torch's, the names of the settings and of the state per parameter decide: a fused or quantized
variant, and a subclass, may take over the state of the original if they keep the same things under the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast._settings import OnFinding
from holdfast._state.contract import Adapter
from holdfast._state.optimizer_matching import Match
from holdfast.errors import OptimizerMismatchError

_TORCH = "torch.optim."
_STATE = {
    "ASGD": {"eta", "mu", "ax"},
    "Adadelta": {"square_avg", "acc_delta"},
    "Adafactor": {"variance", "row_var", "col_var"},
    "Adagrad": {"sum"},
    "Adam": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "AdamW": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "Adamax": {"exp_avg", "exp_inf"},
    "Muon": {"momentum_buffer"},
    "NAdam": {"mu_product", "exp_avg", "exp_avg_sq"},
    "RAdam": {"exp_avg", "exp_avg_sq"},
    "RMSprop": {"square_avg", "momentum_buffer", "grad_avg"},
    "Rprop": {"prev", "step_size"},
    "SGD": {"momentum_buffer"},
    "SparseAdam": {"exp_avg", "exp_avg_sq"},
}
"""What torch's optimizers keep per parameter, besides a counter of steps."""
_ALL_STATE = frozenset[str]().union(*_STATE.values())

_HOW = frozenset({"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"})
"""Settings that say how a step is computed. Newer torch versions distinguish AdamW from Adam by the last one alone."""
_SETTINGS = frozenset(
    {"betas", "eps", "weight_decay", "amsgrad", "maximize", "momentum", "dampening", "nesterov", "alpha", "centered"}
    | {"rho", "lr_decay", "initial_accumulator_value", "etas", "step_sizes", "lambd", "t0", "momentum_decay"}
    | {"beta2_decay", "d", "ns_steps", "ns_coefficients", "adjust_lr_fn", "max_iter", "max_eval", "history_size"}
    | {"tolerance_grad", "tolerance_change", "line_search_fn"}
)
"""Those that torch's optimizers have. Schedulers and programs put others into the groups, which mean nothing here."""


def class_of(optimizer: Optimizer) -> str:
    """The name of the class, with that of its module.

    >>> class_of(torch.optim.AdamW([torch.zeros(1)]))
    'torch.optim.adamw.AdamW'
    """
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def differences(optimizer: Optimizer, stored_class: str | None, stored: Mapping[str, Any]) -> tuple[list[str], str]:
    """Why a stored optimizer is another one than this; nothing if it is the same. With a remark if it is just alike."""
    own = class_of(optimizer)
    if stored_class is not None and _is_same(stored_class, own):
        return [], ""
    found = [*_other_state(optimizer, stored), *_other_settings(optimizer, stored, stored_class)]
    if stored_class is None:
        return found, ""
    said = f"it was saved from {stored_class} and is loaded into {own}"
    if found or (stored_class.startswith(_TORCH) and own.startswith(_TORCH)):
        return [said, *found], ""
    return [], f"{said}, which keeps the same things"


class ComparedOptimizer(Adapter):
    """What the adapters of optimizers have in common: the live one is compared with the stored one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._match: Match | None = None
        self._changes: dict[str, tuple[Any, Any]] = {}
        self._stored_class: str | None = None
        self._on_mismatch: OnFinding = "error"
        self._notes: list[str] = []
        self._warnings: list[str] = []

    def compare(self, stored: Mapping[str, Any], matched: Match, *, is_flat: bool) -> None:
        """Raise if it is another one, or grouped in another way; or note it, if that is allowed.

        In a flat state every parameter is a group of its own, which says nothing about how they were grouped.
        """
        self._match = matched
        problems, remark = differences(self._optimizer, self._stored_class, stored)
        problems = [*problems, *([] if is_flat else matched.regrouped)]
        notes = settle(problems, self._on_mismatch)
        self._notes = [*notes, *([f"optimizer: {remark}"] if remark else [])]
        self._warnings = notes if self._on_mismatch == "warn" else []

    @property
    def kind(self) -> str | None:
        return class_of(self._optimizer)

    def expect(self, stored_kind: str | None, on_mismatch: OnFinding) -> None:
        self._stored_class, self._on_mismatch = stored_kind, on_mismatch

    def warnings(self) -> list[str]:
        return self._warnings

    def changes(self) -> Mapping[str, tuple[Any, Any]]:
        return self._changes

    def notes(self) -> list[str]:
        return [] if self._match is None else [*self._match.notes, *self._notes]


def settle(problems: Sequence[str], on_mismatch: OnFinding) -> list[str]:
    """Raise for what was found, or return it as remarks."""
    if problems and on_mismatch == "error":
        raise OptimizerMismatchError(
            f"The stored optimizer is not like this one: {'; '.join(problems)}. Make the optimizer as it was when it "
            "was saved, leave it out of the state, or pass optimizer_mismatch='warn' or 'ignore' to load it anyway",
            problems=list(problems),
        )
    return [f"optimizer: {problem}" for problem in problems]


def changed_settings(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[Any, Any]]:
    """The settings of groups that a load has changed: what they were, and what they are."""
    found: dict[str, tuple[Any, Any]] = {}
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        for name in new:
            was, now = _plain(old.get(name)), _plain(new[name])
            if name not in ("params", "param_names") and was != now:
                found[f"param_groups.{number}.{name}"] = (was, now)
    return found


def _is_same(stored: str, own: str) -> bool:
    """Whether two names are of one class, which may have moved to another module of its package."""
    return stored.rpartition(".")[2] == own.rpartition(".")[2] and stored.partition(".")[0] == own.partition(".")[0]


def _other_state(optimizer: Optimizer, stored: Mapping[str, Any]) -> list[str]:
    """What the stored optimizer keeps per parameter and this one does not."""
    theirs = _names_in(stored["state"].values())
    ours = _names_in(optimizer.state.values())
    known = next((_STATE[base.__name__] for base in type(optimizer).__mro__ if _is_known(base)), None)
    if known is not None and (class_of(optimizer).startswith(_TORCH) or not theirs & (known | ours)):
        foreign = (theirs & _ALL_STATE) - known - ours
    elif ours and not theirs & ours:
        foreign = theirs
    else:
        foreign = set()
    expected = known if known is not None else ours
    if not foreign:
        return []
    return [f"it keeps {_listed(foreign)} per parameter, where {type(optimizer).__name__} keeps {_listed(expected)}"]


def _is_known(base: type) -> bool:
    return base.__module__.startswith(_TORCH) and base.__name__ in _STATE


def _names_in(entries: Iterable[Any]) -> set[str]:
    names = {name for entry in entries if isinstance(entry, Mapping) for name in entry}
    return {name for name in names if isinstance(name, str) and name != "step"}


def _other_settings(optimizer: Optimizer, stored: Mapping[str, Any], stored_class: str | None) -> list[str]:
    """Settings that only one of the two has. One that is switched off is as good as none."""
    theirs = _settings_in(stored["param_groups"])
    if not theirs:
        return []
    ours = _settings_in(optimizer.param_groups)
    defaults = getattr(optimizer, "defaults", {})
    is_descendant = stored_class in {f"{base.__module__}.{base.__qualname__}" for base in type(optimizer).__mro__}
    lacking = {
        name
        for name, value in defaults.items()
        if name not in theirs and name not in _HOW and not _is_off(value) and not is_descendant
    }
    surplus = {
        name
        for name, value in theirs.items()
        if name in _SETTINGS
        and all(name in group for group in stored["param_groups"])  # or else somebody has put it there
        and name not in ours
        and name not in defaults
        and not _is_off(value)
    }
    problems = []
    if surplus:
        problems.append(f"its groups have {_listed(surplus)}, which {type(optimizer).__name__} does not have")
    if lacking:
        problems.append(f"its groups lack {_listed(lacking)}, which {type(optimizer).__name__} has")
    return problems


def _settings_in(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for group in groups for name, value in group.items() if name not in ("params", "param_names")}


def _is_off(value: Any) -> bool:
    return value is None or value is False


def _plain(value: Any) -> Any:
    """A setting as something that can be compared and shown."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().tolist() if not hasattr(value, "full_tensor") else str(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "nothing"
