"""The commands `shardio view` (samples as pictures) and `shardio report` (an HTML page about a set)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardio.cli.options import (
    CommonFirst,
    folder,
    output_file,
    path_text,
    read_chain,
    selection_options,
    set_argument,
    sheet_options,
    split_option,
)
from shardio.cli.output import levels_of, say, show_sheet
from shardio.errors import DecodeError, SourceError, bytes_text, counted

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy as np
    from numpy.typing import NDArray

    from shardio.conversion.records import Reject
    from shardio.reading.shardset import ShardSet
    from shardio.sets.selection import Selection

    Pictures: TypeAlias = list[NDArray[np.uint8]]
    Column: TypeAlias = tuple[Pictures, list[str]]


@click.command(
    cls=CommonFirst,
    short_help="Show samples of a set as pictures.",
    common=("split", "count", "selected", "keys", "indices", "augmented", "against", "output"),
)
@set_argument
@split_option
@click.option("--count", type=click.IntRange(1, 1000), default=24, help="Number of samples, drawn at random.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of the random samples, and of --augmented.")
@selection_options("indices")
@click.option("--per-class", type=click.IntRange(1, 100), help="Samples per class, for at most 100 classes.")
@click.option("--damaged", is_flag=True, help="Only damaged samples. Reads the whole split to find them.")
@click.option(
    "--augmented",
    metavar="CHAIN",
    type=path_text,
    help="Show each sample with this transform applied: a recipe, or a JSON file of to_dict().",
)
@click.option("--draws", type=click.IntRange(1, 64), default=8, help="Augmented pictures per sample, with --augmented.")
@click.option("--against", type=folder, metavar="SRC", help="Show each sample next to its source image in SRC.")
@sheet_options
def view(
    out: Path,
    split: str,
    count: int,
    seed: int,
    selection: Selection,
    per_class: int | None,
    damaged: bool,
    augmented: str | None,
    draws: int,
    against: Path | None,
    side: int | None,
    output: Path | None,
) -> None:
    """Show samples of the set in OUT with their numbers, classes and keys, in the terminal or as a PNG.

    \b
    shardio view out/                                24 random samples
    shardio view out/ --class tench -o tench.png
    shardio view out/ --where 'source_width < 100'
    shardio view out/ --count 4 --augmented deit3    draws of a recipe
    shardio view out/ --against imagenet/            next to the source images
    """
    import numpy as np

    from shardio.reading.sample import captions_of
    from shardio.reading.shardset import open_shards
    from shardio.sets.verify import verify

    if augmented is not None and against is not None:
        raise click.UsageError("--augmented and --against exclude each other: give one of them")
    shards = open_shards(out, split)
    if per_class is not None and not shards.content.index.has_label:
        raise ValueError("--per-class needs labels, and the split has none: leave --per-class out")
    matching = chosen = selection.samples(shards.index, shards, shards.numbers)
    if damaged and len(matching):
        files = {entry.file for entry in shards.content.files}
        problems = [problem for problem in verify(shards.path).problems if problem.file in files]
        chosen = chosen[np.isin(chosen, [index for problem in problems for index in problem.samples])]
    if selection.indices is None or per_class is not None:
        chosen = _drawn(shards, chosen, selection.classes, np.random.default_rng(seed), count, per_class)
    if not len(chosen):
        if damaged and len(matching):
            say(f"no {'' if selection.is_all else 'matching '}sample of the split is damaged")
        else:
            say(selection.describe_none(shards.index["key"].tolist()))
        return
    columns: list[Column] = [([shards.image_of(index) for index in chosen.tolist()], captions_of(shards, chosen))]
    if augmented is not None:
        columns += _augmented(shards, chosen, columns[0][0], augmented, draws, seed)
    elif against is not None:
        columns.append(_sources(shards, chosen, against))
    pictures = [pictures[row] for row in range(len(chosen)) for pictures, _ in columns]
    captions = [texts[row] for row in range(len(chosen)) for _, texts in columns]
    per_row = None if len(columns) == 1 else 8 if augmented is None else len(columns)
    show_sheet(pictures, captions, output, side=side, group=len(columns), per_row=per_row)


def _drawn(
    shards: ShardSet,
    there: NDArray[np.int64],
    classes: Sequence[str | int],
    rng: np.random.Generator,
    count: int,
    per_class: int | None,
) -> NDArray[np.int64]:
    """Returns random samples of `there`: `per_class` of each class if that is given, else `count` of each of `classes`,
    or `count` in all if `classes` is empty."""
    import numpy as np

    from shardio.sets.selection import find_labels

    if per_class is None and not classes:
        return np.sort(rng.choice(there, min(count, len(there)), replace=False))
    found = shards.labels[there]
    labels = [label for name in classes for label in find_labels(shards, name)]
    chosen = [there[:0]]
    for label in labels or np.unique(found)[:100].tolist():
        some = there[found == label]
        chosen.append(np.sort(rng.choice(some, min(per_class or count, len(some)), replace=False)))
    return np.concatenate(chosen)


def _augmented(
    shards: ShardSet, chosen: NDArray[np.int64], pictures: Pictures, chain: str, draws: int, seed: int
) -> Iterator[Column]:
    """Yields (augmented pictures of the samples `chosen`, captions) for each view of epochs 0 to `draws` - 1.
    `pictures` are the stored pictures, and `chain` names the transform: see `read_chain`."""
    import numpy as np
    import torch

    transform = read_chain(chain, len(shards.classes))
    batch = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)
    has_labels = shards.content.label_row is not None
    labels = torch.from_numpy(shards.labels_of(chosen)) if has_labels else None
    sizes = shards.source_sizes(chosen)
    for epoch in range(draws):
        made: Any = transform(batch, labels, indices=chosen, seed=seed, epoch=epoch, sizes=sizes)
        made = made[0] if has_labels else made
        for view, images in enumerate(made if isinstance(made, tuple) else (made,)):
            name = f"epoch {epoch}" + (f", view {view}" if isinstance(made, tuple) else "")
            yield [*levels_of(images, transform, view)], [name] * len(chosen)


def _sources(shards: ShardSet, chosen: NDArray[np.int64], src: Path) -> Column:
    import numpy as np

    from shardio.conversion.collect import read_again
    from shardio.conversion.images.decode import decode_image

    keys = shards.index["key"][chosen].tolist()
    collection = read_again(src, frozenset(keys))
    # By key alone, as the set may have its splits from `--val` or a table.
    sources = {source.key: source for some in collection.splits.values() for source in some}
    if sources.keys().isdisjoint(keys):
        found = f"found none of {counted(len(keys), 'image')}, such as {os.fsdecode(keys[0])!r}"
        raise SourceError(f"{src}: expected the images that the set was made from, {found}: pass the SRC of `convert`")
    pictures: Pictures = []
    texts: list[str] = []
    for key in keys:
        picture, text = np.zeros((8, 8, 3), np.uint8), "not found"
        if (source := sources.get(key)) is not None:
            try:
                picture = decode_image(collection.origin.read(source)).pixels
                text = f"source\n{picture.shape[1]} x {picture.shape[0]}"
            except (DecodeError, OSError) as error:
                text = f"source\n{error}"
        pictures.append(picture)
        texts.append(text)
    return pictures, texts


@click.command(short_help="Write a page about a set.")
@set_argument
@click.option(
    "-o",
    "--output",
    type=output_file,
    default="report.html",
    help="Path of the page. An existing file is replaced.",
)
@click.option(
    "--source", type=folder, metavar="SRC", help="Also show the refused images of SRC, as far as they decode."
)
@click.option(
    "--pictures",
    type=click.IntRange(1),
    default=20_000,
    help="Pictures to read, to measure brightness and to find pictures that look alike.",
)
def report(out: Path, output: Path, source: Path | None, pictures: int) -> None:
    """Write one self-contained HTML page about the set in OUT.

    It shows how the set was made, its classes with pictures, the sizes of the original images and what resizing lost,
    repeated pictures, and refused images.

    \b
    shardio report out/
    shardio report out/ -o page.html --source imagenet/
    """
    from shardio.conversion.records import read_rejects
    from shardio.system.files import write_output
    from shardio.system.progress import Bar
    from shardio.viewing.pictures import open_splits
    from shardio.viewing.report import MAX_REFUSED, make_report, normalize_lines

    if not output.parent.is_dir():
        raise ValueError(f"--output: the folder {output.parent} does not exist: create it first")
    splits = open_splits(out)
    rejects = read_rejects(out, next(iter(splits.values())).manifest.rejects)
    drawn = [] if source is None else refused_pictures(source, rejects[:MAX_REFUSED])
    refused = [
        (os.fsdecode(reject.key), reject.reason, reject.detail, picture)
        for reject, picture in zip_longest(rejects, drawn)
    ]
    with Bar(unit=" pictures") as bar:
        page, overview = make_report(
            splits, num_pictures=pictures, refused=refused, source_given=source is not None, on_progress=bar.reach
        )
    write_output(output, page)
    say(
        f"{output}: {bytes_text(len(page))}, {counted(overview.num_samples, 'sample')}, "
        f"{overview.num_read:,} pictures read"
    )
    for line in filter(None, normalize_lines(overview.levels).split("\n")):
        say(line)


def refused_pictures(src: Path, rejects: Sequence[Reject]) -> list[str | None]:
    """Returns a thumbnail, as a data URL, or None for each of `rejects`, which are images in `src`. An image has no
    thumbnail if it is missing, cannot be decoded even in part, or was refused as empty or too large. Raises SourceError
    if `src` cannot be converted."""
    from shardio.conversion.collect import read_again
    from shardio.conversion.images.decode import decode_leniently
    from shardio.drawing.sheet import THUMBNAIL_SIDE, thumbnail

    collection = read_again(src, {reject.key for reject in rejects})
    wanted = {reject.key for reject in rejects if reject.reason not in ("too large", "empty")}
    pictures = {}
    for source in chain.from_iterable(collection.splits.values()):
        if source.key in wanted:  # whatever its split: it may be from `--val` or a table
            with contextlib.suppress(DecodeError, OSError):
                data = collection.origin.read(source)
                if isinstance(data, bytes):
                    pictures[source.key] = decode_leniently(data, THUMBNAIL_SIDE)
    drawn = (pictures.get(reject.key) for reject in rejects)
    return [None if picture is None else thumbnail(picture) for picture in drawn]
