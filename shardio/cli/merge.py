"""`shardio merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shardio.cli.changed import change_options, run_change
from shardio.cli.options import Command, folder


def merge_options(command: Command) -> Command:
    """Adds the options that `merge` and `append` share."""
    for option in reversed(
        [
            click.option("--only-common", is_flag=True, help="Leave out columns and arrays that not all sets have."),
            click.option(
                "--same-keys",
                type=click.Choice(["refuse", "allow"]),
                default="refuse",
                help="Two samples of a split with one key.",
            ),
            click.option(
                "--same-images",
                type=click.Choice(["refuse", "keep"]),
                default="refuse",
                help="Two samples, of two of the sets, with the same pixels.",
            ),
        ]
    ):
        command = option(command)
    return command


@click.command(short_help="Join several sets into a new one.")
@click.argument("sets", nargs=-1, metavar="A B ...", required=True)
@click.argument("new", type=folder)
@merge_options
@change_options
def merge(sets: tuple[str, ...], new: Path, **options: Any) -> None:
    """Make a new set in NEW of all samples of the sets A, B, ...

    Splits of one name become one, and classes are united by their names. No pixel is rewritten: files are shared with
    the old sets by hard links. NEW appears whole or not at all; the old sets stay as they are.
    """
    from shardio.changes.merge import merge as merge_sets

    run_change(merge_sets, list(sets), new, **options)
