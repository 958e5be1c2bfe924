"""Scripts by which shells complete the commands and options of ``holdfast``, made from what is declared."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.cli.described import Described, Option, described_commands

_TOP = ("--help", "--version", "--debug")


def script_for(shell: str) -> str:
    """The script for ``bash``, ``zsh`` or ``fish``."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](described_commands())


def _names(command: Described) -> list[str]:
    return [name for option in command.options for name in option.names] + ["--help"]


def _bash(commands: Sequence[Described]) -> str:
    names = " ".join([*(command.name for command in commands), *_TOP])
    options = "\n".join(f'        {command.name}) words="{" ".join(_names(command))}" ;;' for command in commands)
    values = "\n".join(
        f'        "{command.name} {name}") COMPREPLY=($(compgen -W "{" ".join(option.choices)}" -- "$word")); return ;;'
        for command in commands
        for option in command.options
        if option.choices
        for name in option.names
    )
    arguments = "\n".join(
        f'        {command.name}) words="$words {" ".join(argument.choices)}"; chosen=1 ;;'
        for command in commands
        for argument in command.arguments
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
    listed = "\n".join(f"        {_quoted(f'{command.name}:{command.title}')}" for command in commands)
    cases = "\n".join(f"        {command.name}) _arguments {_zsh_arguments(command)} ;;" for command in commands)
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


def _zsh_arguments(command: Described) -> str:
    parts = []
    for option in command.options:
        text = option.help.replace("[", "(").replace("]", ")").replace(":", " ")
        value = f":value:({' '.join(option.choices)})" if option.choices else ":value:_files" if option.metavar else ""
        parts += [_quoted(f"*{name}[{text}]{value}") for name in option.names]
    choices = [choice for argument in command.arguments for choice in argument.choices]
    if command.arguments:
        parts.append(_quoted(f"*:argument:({' '.join(choices)})" if choices else "*:path:_files"))
    return " ".join(parts) or "--help"


def _fish(commands: Sequence[Described]) -> str:
    lines = ["# Completion of holdfast for fish. Made by `holdfast completion fish`."]
    lines += [f"complete -c holdfast -n __fish_use_subcommand -l {name.removeprefix('--')}" for name in _TOP]
    for command in commands:
        title = _quoted(command.title)
        lines.append(f"complete -c holdfast -f -n __fish_use_subcommand -a {command.name} -d {title}")
        condition = f"-n '__fish_seen_subcommand_from {command.name}'"
        lines += [f"complete -c holdfast {condition} {_fish_option(option)}" for option in command.options]
        choices = [choice for argument in command.arguments for choice in argument.choices]
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
