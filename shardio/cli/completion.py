"""`shardio completion`, and what the shell is told of values."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class

_VARIABLE = "_SHARDIO_COMPLETE"
_WHERE = {
    "bash": "~/.local/share/bash-completion/completions/shardio",
    "zsh": "~/.zfunc/_shardio",
    "fish": "~/.config/fish/completions/shardio.fish",
}


@click.command(short_help="Print what a shell needs to complete commands.")
@click.argument("shell", type=click.Choice([*_WHERE]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes commands, options, sets, splits and classes in SHELL.

    \b
    mkdir -p ~/.local/share/bash-completion/completions
    shardio completion bash \\
        > ~/.local/share/bash-completion/completions/shardio
    \b
    mkdir -p ~/.zfunc; shardio completion zsh > ~/.zfunc/_shardio
    # and in ~/.zshrc: fpath+=~/.zfunc; autoload -U compinit; compinit
    \b
    shardio completion fish > ~/.config/fish/completions/shardio.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "shardio", _VARIABLE).source())


def complete_set(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns the names of sets in the catalogue, and has the shell complete folders beside them."""
    return [*map(CompletionItem, _names(incomplete)), CompletionItem(incomplete, type="dir")]


def _names(incomplete: str) -> Iterator[str]:
    """Yields what the roots of SHARDIO_PATH that are folders here have, and looks at nothing but their lists."""
    from shardio.sets.names import catalogue_roots, is_url

    for root in catalogue_roots():
        if is_url(root):
            continue
        try:
            found = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        except OSError:
            continue
        yield from (name for name in found if name.startswith(incomplete) and not name.startswith("."))


def complete_split(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Returns the splits of the set that the command line names."""
    return [name for name in _of_manifest(context, "splits") if name.startswith(incomplete)]


def complete_class(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Returns the classes of the set that the command line names, by their names and by what people call them."""
    names = [*_of_manifest(context, "classes"), *_of_manifest(context, "class_names")]
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def _of_manifest(context: click.Context, field: str) -> list[str]:
    """Returns names in the set's manifest. A shell that waits for an answer gets none where anything is wrong."""
    from shardio.errors import ShardioError
    from shardio.format.manifest_file import load_manifest
    from shardio.sets.names import find_folder

    # Behind an option that still lacks its value, click leaves arguments as words.
    out = context.params.get("out") or next((word for word in context.args if not word.startswith("-")), None)
    try:
        return list(getattr(load_manifest(Path(find_folder(out))), field)) if out else []
    except (ShardioError, OSError):
        return []
