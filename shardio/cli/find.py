"""The commands `shardio find` and `shardio extract`, which print matching samples or write them as files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardio.cli.options import (
    folder,
    json_option,
    path_text,
    selection_options,
    set_argument,
    split_option,
    splits_option,
)
from shardio.cli.output import next_step, say, telling_of_servers
from shardio.errors import counted, printable, shortened

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shardio.sets.index import IndexedSet
    from shardio.sets.selection import Selection

# Lines that are written at a time: a million of single ones would take most of the time.
_CHUNK = 10_000


@click.command(short_help="Find samples by class, key and numbers.")
@click.argument("out", type=path_text)
@splits_option
@selection_options()
@json_option
def find(out: str, split: Sequence[str], selection: Selection, as_json: bool) -> None:
    """Print number, class and key of the samples in OUT, a folder or a URL, that match every condition.

    \b
    shardio find out/ --class tench
    shardio find out/ --key '*_10026*'
    shardio find out/ --where 'source_width >= 500' --where 'source_height < 200'
    """
    from shardio.sets.index import read_indexes

    with telling_of_servers([out]):
        indexed = read_indexes(out, split, selection)
    if as_json:
        _print_json(indexed)
    elif any(map(len, indexed.found.values())):
        _print_lines(out, indexed)
    else:
        say(selection.describe_none([key for rows in indexed.splits.values() for key in rows["key"].tolist()]))


def _next_view(out: object, split: str, samples: NDArray[np.int64]) -> str:
    """Returns a line that suggests a `shardio view` command for the first 12 of `samples`, of a split of `out`."""
    words = [] if split == "train" else ["--split", split]
    return next_step("view", out, *words, "--indices", ",".join(map(str, samples[:12].tolist())))


def _chunks(indexed: IndexedSet) -> Iterator[tuple[str, Any]]:
    """Yields (split, records) for chunks of the found samples. A record is (number, label, key) of a sample."""
    from shardio.format.layout import has_label

    for split, samples in indexed.found.items():
        for first in range(0, len(samples), _CHUNK):
            some = samples[first : first + _CHUNK]
            rows = indexed.splits[split][some]
            labels = rows["label"].tolist() if has_label(rows.dtype) else [None] * len(rows)
            yield split, zip(some.tolist(), labels, rows["key"].tolist(), strict=True)


def _print_lines(out: str, indexed: IndexedSet) -> None:
    """Prints a line for each found sample, then a summary. Lines name the split if several splits were searched. `out`
    is the set as the user wrote it."""
    from shardio.reading.sample import class_text
    from shardio.sets.names import is_url

    names = [shortened(name, 24) for name in indexed.manifest.class_names or indexed.manifest.classes]
    found = {split: samples for split, samples in indexed.found.items() if len(samples)}
    width = len(str(max(int(samples[-1]) for samples in found.values())))
    widest = max(len(class_text(label, names)) for _, records in _chunks(indexed) for _, label, _ in records)
    for split, records in _chunks(indexed):
        before = f"{split}  " if len(indexed.splits) > 1 else ""
        click.echo(
            "\n".join(
                f"{before}{number:>{width}}  {class_text(label, names):<{widest}}  {printable(os.fsdecode(key))}"
                for number, label, key in records
            )
        )
    total, of = sum(map(len, found.values())), sum(map(len, indexed.splits.values()))
    say(f"{total:,} of {counted(of, 'sample')}")
    if indexed.manifest.sample_shape is None or is_url(indexed.place):  # `view` shows pictures in folders
        return
    split, samples = next(iter(found.items()))
    say(_next_view(out, split, samples))


def _print_json(indexed: IndexedSet) -> None:
    """Prints the found samples as one JSON object, chunk by chunk to save memory."""
    classes, names = indexed.manifest.classes, indexed.manifest.class_names
    whole = {"path": indexed.place, "num_samples": sum(map(len, indexed.found.values())), "samples": []}
    click.echo(json.dumps(whole).removesuffix("]}"), nl=False)
    comma = ""
    for split, records in _chunks(indexed):
        facts = [
            {
                "split": split,
                "index": number,
                "label": label,
                "class": classes[label] if classes and label is not None else None,
                "class_name": names[label] if names and label is not None else None,
                "key": os.fsdecode(key),
            }
            for number, label, key in records
        ]
        click.echo(comma + json.dumps(facts)[1:-1], nl=False)
        comma = ", "
    click.echo("]}")


@click.command(short_help="Write samples as PNGs.")
@set_argument
@split_option
@selection_options("indices")
@click.option("-o", "--output", type=folder, required=True, metavar="DIR", help="Folder to write the files into.")
def extract(out: Path, split: str, selection: Selection, output: Path) -> None:
    """Write samples of the set in OUT into DIR, as files for other programs.

    Pixels and masks become lossless PNGs, other arrays NPY files; labels.csv describes each file, and has numbers.

    \b
    shardio extract out/ --indices 5,17 -o some/
    shardio extract out/ --split val --class tench -o tenches/
    """
    from shardio.reading.shardset import open_shards
    from shardio.system.progress import Bar
    from shardio.viewing.extract import LABELS_FILE, extract

    if selection.is_all:
        raise click.UsageError("choose samples: give --indices, or some of --class, --key and --where")
    shards = open_shards(out, split)
    chosen = selection.samples(shards.index, shards, shards.numbers)
    if not len(chosen):
        say(selection.describe_none(shards.index["key"].tolist()))
        return
    with Bar(unit=" samples") as bar:
        num_files = extract(shards, chosen, output, bar.reach)
    say(f"{output}: {counted(len(chosen), 'sample')} in {counted(num_files, 'file')}; {LABELS_FILE} describes each")
    if shards.has_pixels:
        say(_next_view(out, split, chosen))
