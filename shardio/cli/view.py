"""`shardio view`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardio.cli.options import folder, parsed, set_argument
from shardio.cli.output import say
from shardio.cli.pictures import captions_of, levels_of, read_chain, sheet_options, show_sheet

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy as np
    from numpy.typing import NDArray

    from shardio.reading.shardset import ShardSet

    Pictures: TypeAlias = list[NDArray[np.uint8]]


def parse_numbers(text: str) -> list[int]:
    """Reads whole numbers with commas between them, and ranges such as 3-7."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isascii() or not first.isdigit() or (dash and not (last.isascii() and last.isdigit())):
            raise ValueError("numbers such as 5,17 or 0-23")
        numbers += range(int(first), int(last or first) + 1)
        if len(numbers) > 10_000:
            raise ValueError("at most 10,000 numbers")
    return numbers


@click.command(short_help="Show samples of a set as a sheet of pictures.")
@set_argument
@click.option("--split", default="train", help="Split to show.")
@click.option("--count", type=click.IntRange(1, 1000), default=24, help="Samples to show, drawn at random.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Which samples are drawn.")
@click.option("--indices", callback=parsed(parse_numbers), metavar="5,17,0-9", help="These samples instead.")
@click.option("--class", "classes", multiple=True, metavar="NAME", help="Samples of this class only. Repeatable.")
@click.option("--per-class", type=click.IntRange(1, 100), help="So many samples of each class, of at most 100 classes.")
@click.option("--damaged", is_flag=True, help="Damaged samples only: reads the whole split to find them.")
@click.option("--augmented", metavar="CHAIN", help="Draws of a recipe, or of a chain in a JSON file, of each sample.")
@click.option("--draws", type=click.IntRange(1, 64), default=8, help="Draws of each sample, with --augmented.")
@click.option("--against", type=folder, metavar="SRC", help="The source of each sample beside it.")
@sheet_options
def view(
    out: Path,
    split: str,
    count: int,
    seed: int,
    indices: list[int] | None,
    classes: Sequence[str],
    per_class: int | None,
    damaged: bool,
    augmented: str | None,
    draws: int,
    against: Path | None,
    columns: int | None,
    side: int | None,
    output: Path | None,
) -> None:
    """Show samples of the set in OUT, with their numbers, classes and keys: in the terminal, or as a PNG.

    \b
    shardio view out/                                   24 samples, at random
    shardio view out/ --class tench -o tench.png
    shardio view out/ --count 4 --augmented deit3       what a recipe makes of them
    shardio view out/ --against imagenet/               each beside the image it was made of
    """
    import numpy as np

    from shardio.reading.shardset import open_shards
    from shardio.viewing.sheet import sheet

    if augmented is not None and against is not None:
        raise click.UsageError("--augmented and --against show different things: give one of them")
    shards = open_shards(out, split)
    rng = np.random.default_rng(seed)
    chosen = _chosen(shards, rng, count, indices, classes, per_class, damaged)
    if not chosen:
        say("no sample of the split is damaged" if damaged else "no such sample")
        return
    captions = captions_of(shards, chosen)
    pictures: Pictures = [shards[index].image for index in chosen]
    if augmented is not None:
        pictures, captions, columns = _augmented(shards, chosen, captions, augmented, draws, seed)
    elif against is not None:
        pictures, captions = _beside_sources(shards, chosen, captions, against)
        columns = columns or 8
    show_sheet(sheet(pictures, captions, columns=columns, side=side), output)


def _chosen(
    shards: ShardSet,
    rng: np.random.Generator,
    count: int,
    indices: list[int] | None,
    classes: Sequence[str],
    per_class: int | None,
    damaged: bool,
) -> list[int]:
    if indices is not None:
        return [_checked(shards, index) for index in indices]
    if damaged:
        return _damaged(shards)[:count]
    if per_class is not None or classes:
        return _of_classes(shards, rng, classes, per_class, count)
    return sorted(rng.choice(len(shards), min(count, len(shards)), replace=False).tolist())


def _checked(shards: ShardSet, index: int) -> int:
    if index >= len(shards):
        raise ValueError(f"--indices: expected samples from 0 to {len(shards) - 1}; found {index}")
    return index


def _damaged(shards: ShardSet) -> list[int]:
    from shardio.sets.verify import verify

    files = {entry.file for entry in shards.content.files}
    problems = verify(shards.path).problems
    return sorted({index for problem in problems if problem.file in files for index in problem.samples})


def _of_classes(
    shards: ShardSet, rng: np.random.Generator, classes: Sequence[str], per_class: int | None, count: int
) -> list[int]:
    import numpy as np

    labels = [_label_of(shards, name) for name in classes]
    if not labels:
        labels = np.unique(shards.labels)[:100].tolist()
    chosen: list[int] = []
    for label in labels:
        there = np.flatnonzero(shards.labels == label)
        chosen += sorted(rng.choice(there, min(per_class or count, len(there)), replace=False).tolist())
    return chosen


def _label_of(shards: ShardSet, name: str) -> int:
    """Returns the label of a class by its name, by what people call it, or by its number."""
    import difflib

    for names in (shards.classes, shards.class_names):
        if name in names:
            return names.index(name)
    if name.isdigit() and (not shards.classes or int(name) < len(shards.classes)):
        return int(name)
    close = difflib.get_close_matches(name, [*shards.class_names, *shards.classes], 3)
    hint = (
        f": did you mean {', '.join(close)}?"
        if close
        else f"; there are {len(shards.classes)}, such as " + ", ".join(shards.class_names[:3])
    )
    raise ValueError(f"--class: expected a class of the set, found {name!r}{hint}")


def _augmented(
    shards: ShardSet, chosen: Sequence[int], captions: Sequence[str], chain: str, draws: int, seed: int
) -> tuple[Pictures, list[str], int]:
    """Returns each sample, and so many draws of it: those of the epochs from 0 on."""
    import numpy as np
    import torch

    transform = read_chain(chain, len(shards.classes))
    batch = torch.from_numpy(np.stack([shards[index].image for index in chosen])).permute(0, 3, 1, 2)
    labels = torch.from_numpy(shards.labels[list(chosen)].copy())
    rows: list[list[NDArray[np.uint8]]] = [[shards[index].image] for index in chosen]
    texts = [[caption] for caption in captions]
    for epoch in range(draws):
        made, _ = transform(batch, labels, indices=np.array(chosen), seed=seed, epoch=epoch)
        for view, images in enumerate(made if isinstance(made, tuple) else (made,)):
            name = f"epoch {epoch}" + (f", view {view}" if isinstance(made, tuple) else "")
            for row, text, picture in zip(rows, texts, levels_of(images, transform), strict=True):
                row.append(picture)
                text.append(name)
    pictures = [picture for row in rows for picture in row]
    return pictures, [text for part in texts for text in part], len(rows[0])


def _beside_sources(
    shards: ShardSet, chosen: Sequence[int], captions: Sequence[str], src: Path
) -> tuple[Pictures, list[str]]:
    """Returns each sample beside the image that it was made of."""
    import numpy as np

    from shardio.conversion.images.decode import decode_image
    from shardio.conversion.sources.detect import scan
    from shardio.errors import DecodeError

    collection = scan(src, accept_layout=True, empty_classes="keep")
    sources = {source.key: source for source in collection.splits.get(shards.split, ())}
    pictures: Pictures = []
    texts: list[str] = []
    for index, caption in zip(chosen, captions, strict=True):
        pictures.append(shards[index].image)
        texts.append(caption)
        source = sources.get(bytes(shards.index["key"][index]))
        picture, text = np.zeros((8, 8, 3), np.uint8), "not there"
        if source is not None:
            try:
                picture = decode_image(collection.origin.read(source)).pixels
                text = f"source\n{picture.shape[1]} x {picture.shape[0]}"
            except (DecodeError, OSError) as error:
                text = f"source\n{error}"
        pictures.append(picture)
        texts.append(text)
    return pictures, texts
