"""All commands with their options and arguments, as data: for documents and for the completion of shells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

from holdfast._cli.app import COMMANDS, Example, app


@dataclass(frozen=True)
class Option:
    """An option of a command."""

    names: Sequence[str]
    metavar: str
    """What comes behind it; empty for one that is given or not."""
    help: str
    default: str = ""
    choices: Sequence[str] = ()


@dataclass(frozen=True)
class Argument:
    """An argument of a command."""

    metavar: str
    help: str
    required: bool
    several: bool
    choices: Sequence[str] = ()


@dataclass(frozen=True)
class Described:
    """A command."""

    name: str
    title: str
    """The first line of its help."""
    text: str
    """The rest."""
    arguments: Sequence[Argument]
    options: Sequence[Option]
    examples: Sequence[Example]

    @property
    def usage(self) -> str:
        """How it is called."""
        shown = []
        for argument in self.arguments:
            name = argument.metavar + ("..." if argument.several else "")
            shown.append(name if argument.required else f"[{name}]")
        return " ".join(["holdfast", self.name, "[OPTIONS]", *shown])


def described_commands() -> list[Described]:
    """All commands, in the order in which they were declared."""
    group: Any = typer.main.get_command(app)
    return [_described(name, group.commands[name]) for name in COMMANDS]


def _described(name: str, command: Any) -> Described:
    title, _, text = (command.help or "").partition("\n")
    types = get_type_hints(COMMANDS[name].function)
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option"]
    return Described(
        name,
        title.strip(),
        text.strip(),
        [_argument(param, types[param.name]) for param in arguments],
        [_option(param, types[param.name]) for param in options],
        COMMANDS[name].examples,
    )


def _argument(param: Any, type_: Any) -> Argument:
    metavar = param.metavar or param.name.upper()
    return Argument(metavar, param.help or "", bool(param.required), param.nargs != 1, _choices(type_))


def _option(param: Any, type_: Any) -> Option:
    choices = _choices(type_)
    metavar = "" if param.is_flag else param.metavar or "|".join(choices) or _word_for(type_)
    default = param.show_default if isinstance(param.show_default, str) else param.default
    shown = "" if default in (None, False, (), []) or callable(default) else str(getattr(default, "value", default))
    return Option([*param.opts, *param.secondary_opts], metavar, param.help or "", shown, choices)


def _choices(type_: Any) -> list[str]:
    """The values that an enum has; nothing for other types."""
    enums = [one for one in (type_, *get_args(type_)) if isinstance(one, type) and issubclass(one, Enum)]
    return [str(member.value) for member in enums[0]] if enums else []


def _word_for(type_: Any) -> str:
    """What an option without a word of its own is followed by."""
    types = {type_, *get_args(type_)}
    return "NUMBER" if types & {int, float} else "PATH" if Path in types else "TEXT"
