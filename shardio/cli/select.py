"""`shardio select` and `shardio drop`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shardio.cli.changed import change_options, new_argument, run_change
from shardio.cli.options import (
    Command,
    class_option,
    folder,
    indices_option,
    key_option,
    parsed,
    set_argument,
    splits_option,
    where_option,
)
from shardio.cli.verify import parse_share


def _conditions(command: Command) -> Command:
    """Adds the options that say which samples are meant."""
    for option in reversed(
        [
            splits_option,
            class_option,
            key_option,
            where_option,
            click.option("--list", "listed", type=folder, metavar="FILE", help="Keys, one in each line."),
            indices_option,
            click.option(
                "--random",
                callback=parsed(parse_share),
                metavar="P%",
                help="A share of the samples for which all else holds, chosen by --seed.",
            ),
            click.option("--seed", type=click.IntRange(0, (1 << 64) - 1), default=0, help="Seed of --random."),
            click.option(
                "--used-classes", is_flag=True, help="Leave out classes without samples, and number the others anew."
            ),
        ]
    ):
        command = option(command)
    return command


@click.command(short_help="Keep some samples, in a new set.")
@set_argument
@new_argument
@_conditions
@change_options
def select(out: Path, new: Path, split: tuple[str, ...], **options: Any) -> None:
    """Make a new set in NEW of some samples of the set in OUT: those for which all that is given holds.

    No pixel is rewritten: files that stay are shared between both sets by hard links, and an order says which of their
    rows are samples. NEW appears whole or not at all; OUT stays as it is.
    """
    from shardio.changes.select import select as select_samples

    run_change(select_samples, out, new, split=split or None, **options)


@click.command(short_help="Leave out some samples, in a new set.")
@set_argument
@new_argument
@_conditions
@change_options
def drop(out: Path, new: Path, split: tuple[str, ...], **options: Any) -> None:
    """Make a new set in NEW of the set in OUT without the samples that `shardio select` would take.

    With --split and nothing else, these splits are left out as a whole.
    """
    from shardio.changes.select import drop as drop_samples

    run_change(drop_samples, out, new, split=split or None, **options)
