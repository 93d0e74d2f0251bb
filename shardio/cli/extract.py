"""`shardio extract`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from shardio.cli.options import conditions, folder, indices_option, set_argument
from shardio.cli.output import next_step, say
from shardio.errors import counted


@click.command(short_help="Write samples as PNGs.")
@set_argument
@click.option("--split", default="train", help="Split of the samples.")
@indices_option
@conditions
@click.option("-o", "--output", type=folder, required=True, metavar="DIR", help="Folder of the files.")
def extract(
    out: Path,
    split: str,
    indices: list[int] | Path | None,
    selected: Sequence[str],
    keys: Sequence[str],
    where: Sequence[str],
    output: Path,
) -> None:
    """Write samples of the set in OUT into DIR, as files for other programs.

    Pixels and masks become lossless PNGs, other arrays NPY files; labels.csv describes each file.

    \b
    shardio extract out/ --indices 5,17 -o some/
    shardio extract out/ --split val --class tench -o tenches/
    """
    from shardio.reading.shardset import open_shards
    from shardio.sets.selection import Selection
    from shardio.system.progress import Bar
    from shardio.viewing.extract import LABELS_NAME, extract

    selection = Selection(classes=selected, keys=keys, where=where, indices=indices)
    if selection.is_all:
        raise click.UsageError("say which samples: with --indices alone, or with --class, --key and --where")
    shards = open_shards(out, split)
    chosen = selection.samples(shards.index, shards)
    if not len(chosen):
        say(selection.describe_none(shards.index["key"].tolist()))
        return
    with Bar(unit=" samples") as bar:
        num_files = extract(shards, chosen.tolist(), output, bar.reach)
    say(f"{output}: {counted(len(chosen), 'sample')} in {counted(num_files, 'file')}; {LABELS_NAME} describes each")
    words = [] if split == "train" else ["--split", split]
    say(next_step("view", out, *words, "--indices", ",".join(map(str, chosen[:12].tolist()))))
