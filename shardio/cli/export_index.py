"""`shardio export-index`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from shardio.cli.options import splits_option
from shardio.cli.output import next_step, say, telling_of_servers

if TYPE_CHECKING:
    from shardio.sets.export import Kind


@click.command("export-index", short_help="Write a table of all samples.")
@click.argument("out")
@click.argument("file", type=click.Path(path_type=str))
@splits_option
@click.option(
    "--format", "kind", type=click.Choice(["csv", "jsonl", "parquet"]), help="Kind of table.  [default: as FILE ends]"
)
def export_index(out: str, file: str, split: Sequence[str], kind: str | None) -> None:
    """Write a table of all samples of the set in OUT, a folder or a URL, to FILE.

    Its columns are split, number, key, label, class, name for people, size of the original, crc32, the set's own
    columns, shard, and row in the shard.

    \b
    shardio export-index out/ index.parquet
    shardio export-index out/ index.csv --split train
    shardio export-index out/ - --format jsonl        to the standard output

    Keys are bytes. CSV has these bytes. JSON has an escape such as \\udcff for a byte that is no UTF-8, which Python's
    os.fsencode makes bytes again. Parquet has text, or bytes if a key of the set is no UTF-8.
    """
    from shardio.sets.export import export_index, kind_of_name

    if file == "-" and kind in (None, "parquet"):
        raise click.UsageError("for the standard output, expected --format csv or jsonl")
    chosen = cast("Kind", kind) if kind else kind_of_name(file)
    with telling_of_servers([out]):
        report = export_index(out, sys.stdout.buffer if file == "-" else Path(file), chosen, split)
    if file != "-":
        say(f"{file}: {report.num_samples:,} samples, {len(report.columns)} columns")
        say(next_step("stats", out))
