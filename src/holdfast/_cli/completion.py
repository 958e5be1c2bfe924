"""``holdfast completion``: what the Tab key does in a shell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from holdfast._cli.app import Example, command
from holdfast._cli.console import reply
from holdfast._cli.described import Described, Option, described_commands
from holdfast._cli.options import Json

# Scripts by which shells complete the commands and options of ``holdfast``, made from what is declared.


_TOP = ("--help", "--version", "--debug")


def script_for(shell: str) -> str:
    """The script for ``bash``, ``zsh`` or ``fish``."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](described_commands())


def _names(one: Described) -> list[str]:
    return [name for option in one.options for name in option.names] + ["--help"]


def _bash(commands: Sequence[Described]) -> str:
    names = " ".join([*(one.name for one in commands), *_TOP])
    options = "\n".join(f'        {one.name}) words="{" ".join(_names(one))}" ;;' for one in commands)
    values = "\n".join(
        f'        "{one.name} {name}") COMPREPLY=($(compgen -W "{" ".join(option.choices)}" -- "$word")); return ;;'
        for one in commands
        for option in one.options
        if option.choices
        for name in option.names
    )
    arguments = "\n".join(
        f'        {one.name}) words="$words {" ".join(argument.choices)}"; chosen=1 ;;'
        for one in commands
        for argument in one.arguments
        if argument.choices
    )
    return f"""# Completion of holdfast for bash. Made by `holdfast completion bash`.
_holdfast() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="" words="" chosen="" at
    for ((at = 1; at < COMP_CWORD; at++)); do
        if [[ "${{COMP_WORDS[at]}}" != -* ]]; then command="${{COMP_WORDS[at]}}"; break; fi
    done
    case "$command $before" in
{values}
    esac
    case "$command" in
        "") words="{names}"; chosen=1 ;;
{options}
    esac
    case "$command" in
{arguments}
        *) ;;
    esac
    COMPREPLY=()
    if [[ -n "$chosen" || "$word" == -* ]]; then COMPREPLY=( $(compgen -W "$words" -- "$word") ); fi
}}
complete -o default -o bashdefault -F _holdfast holdfast
"""


def _zsh(commands: Sequence[Described]) -> str:
    listed = "\n".join(f"        {_quoted(f'{one.name}:{one.title}')}" for one in commands)
    cases = "\n".join(f"        {one.name}) _arguments {_zsh_arguments(one)} ;;" for one in commands)
    return f"""#compdef holdfast
# Completion of holdfast for zsh. Made by `holdfast completion zsh`.
_holdfast() {{
    local -a commands=(
{listed}
    )
    if (( CURRENT == 2 )); then _describe command commands; return; fi
    local command="$words[2]"
    shift words; (( CURRENT-- ))
    case "$command" in
{cases}
    esac
}}
if [[ "$funcstack[1]" == "_holdfast" ]]; then _holdfast "$@"; else compdef _holdfast holdfast; fi
"""


def _zsh_arguments(one: Described) -> str:
    parts = []
    for option in one.options:
        text = option.help.replace("[", "(").replace("]", ")").replace(":", " ")
        value = f":value:({' '.join(option.choices)})" if option.choices else ":value:_files" if option.metavar else ""
        parts += [_quoted(f"*{name}[{text}]{value}") for name in option.names]
    choices = [choice for argument in one.arguments for choice in argument.choices]
    if one.arguments:
        parts.append(_quoted(f"*:argument:({' '.join(choices)})" if choices else "*:path:_files"))
    return " ".join(parts) or "--help"


def _fish(commands: Sequence[Described]) -> str:
    lines = ["# Completion of holdfast for fish. Made by `holdfast completion fish`."]
    lines += [f"complete -c holdfast -n __fish_use_subcommand -l {name.removeprefix('--')}" for name in _TOP]
    for one in commands:
        title = _quoted(one.title)
        lines.append(f"complete -c holdfast -f -n __fish_use_subcommand -a {one.name} -d {title}")
        condition = f"-n '__fish_seen_subcommand_from {one.name}'"
        lines += [f"complete -c holdfast {condition} {_fish_option(option)}" for option in one.options]
        choices = [choice for argument in one.arguments for choice in argument.choices]
        if choices:
            lines.append(f"complete -c holdfast -f {condition} -a {_quoted(' '.join(choices))}")
    return "\n".join(lines) + "\n"


def _fish_option(option: Option) -> str:
    names = " ".join(
        f"-l {name.removeprefix('--')}" if name.startswith("--") else f"-s {name.removeprefix('-')}"
        for name in option.names
    )
    value = f" -x -a {_quoted(' '.join(option.choices))}" if option.choices else " -r" if option.metavar else ""
    return f"{names}{value} -d {_quoted(option.help)}"


def _quoted(text: str) -> str:
    """A text as one word of a shell."""
    return "'" + text.replace("'", "'\\''") + "'"


class Shell(str, Enum):
    """Shells that a script can be made for."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


@command(
    "completion",
    examples=[
        Example("holdfast completion bash", "print the script"),
        Example("holdfast completion zsh --install", "put it where zsh looks for such scripts", runs=False),
    ],
)
def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell.", show_default=False)],
    install: Annotated[
        bool, typer.Option("--install", help="Write it to the folder of the shell, and print its path.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Complete commands and options of holdfast with the Tab key.

    The script knows all commands and options of this version, so that the shell need not start holdfast for them. No
    file of settings is changed: bash and fish find the folder by themselves; for zsh a line to add is shown.
    """

    script = script_for(shell.value)
    if not install:
        reply({"shell": shell.value, "script": script}, script.rstrip("\n"), as_json=as_json)
        return
    path = _path_for(shell)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    hint = (
        ""
        if shell is not Shell.zsh
        else f"\nAdd this to ~/.zshrc: fpath+=({path.parent}); autoload -Uz compinit; compinit"
    )
    reply({"shell": shell.value, "path": str(path)}, f"wrote {path}; it works in new shells{hint}", as_json=as_json)


def _path_for(shell: Shell) -> Path:
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return {
        Shell.bash: data / "bash-completion/completions/holdfast",
        Shell.zsh: Path.home() / ".zfunc/_holdfast",
        Shell.fish: config / "fish/completions/holdfast.fish",
    }[shell]
