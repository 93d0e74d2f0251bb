"""`shardio relabel`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shardio.cli.changed import change_options, new_argument, run_change
from shardio.cli.options import folder, set_argument, splits_option


@click.command(short_help="Change labels of samples, in a new set.")
@set_argument
@new_argument
@click.option(
    "--by",
    "labels",
    type=folder,
    required=True,
    metavar="FILE",
    help="CSV or parquet with the columns `key` and `label`: a class, or its number.",
)
@splits_option
@click.option("--new-classes", is_flag=True, help="Take names that are no class yet as classes behind the others.")
@click.option(
    "--classes",
    type=folder,
    metavar="FILE",
    help="All classes of the new set in their order, one in each line.",
)
@change_options
def relabel(out: Path, new: Path, labels: Path, split: tuple[str, ...], classes: Path | None, **options: Any) -> None:
    """Make a new set in NEW of the set in OUT, in which some samples have other labels.

    Samples without a row in the file keep theirs. Only indexes are written: all else is shared between both sets by
    hard links. NEW appears whole or not at all; OUT stays as it is.
    """
    from shardio.changes.relabel import relabel as relabel_samples
    from shardio.changes.tables import read_lines

    names = None if classes is None else read_lines(classes)
    run_change(relabel_samples, out, new, labels, split=split or None, classes=names, **options)
