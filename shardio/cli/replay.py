"""`shardio replay`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardio.cli.options import (
    folder,
    json_option,
    mix_option,
    output_file,
    parsed,
    read_chain,
    set_argument,
    sheet_options,
    split_option,
)
from shardio.cli.output import levels_of, say, show, show_sheet, table

if TYPE_CHECKING:
    from shardio.loading.loader import ShardLoader
    from shardio.order.orders import Shuffle


# How deep in a checkpoint a loader's state is looked for.
_MOST_DEPTH = 10


def _parse_shuffle(text: str) -> Shuffle:
    from shardio.order.orders import BlockShuffle

    if text in ("true", "false"):
        return text == "true"
    if text == "block":
        return BlockShuffle()
    if found := re.fullmatch("block:([1-9][0-9]*),([1-9][0-9]*)", text):
        return BlockShuffle(*map(int, found.groups()))
    raise ValueError("true, false, block, or block:SIZE,WINDOW such as block:32,256")


@click.command(short_help="Show the batch of a training step.")
@set_argument
@split_option
@click.option("--batch-size", type=click.IntRange(1), required=True, help="Batch size of one rank.")
@click.option("--epoch", type=click.IntRange(0), default=0)
@click.option("--step", type=click.IntRange(0), help="Batches of this rank before this one in the epoch.  [default: 0]")
@click.option(
    "--consumed", type=click.IntRange(0), help="Samples of all ranks before this batch in the epoch, instead of --step."
)
@click.option(
    "--state",
    type=folder,
    metavar="FILE",
    help="Saved state of the loader, instead of --step: JSON or a torch checkpoint.",
)
@click.option("--rank", type=click.IntRange(0), default=0)
@click.option("--world-size", type=click.IntRange(1), default=1)
@click.option("--seed", type=click.IntRange(0), default=0)
@click.option("--shuffle", metavar="true|false|block[:SIZE,WINDOW]", callback=parsed(_parse_shuffle), default="true")
@click.option("--tail", type=click.Choice(["drop", "pad", "short"]), default="drop", help="As in the loader.")
@click.option("--epoch-batches", type=click.IntRange(1), metavar="N", help="As in the loader.")
@click.option("--repeats", type=click.IntRange(1), default=1, help="As in the loader.")
@mix_option
@click.option("--transform", "chain", metavar="CHAIN", help="A recipe, or a JSON file of the transform's to_dict().")
@click.option("--save", type=output_file, help="Write the batch there, as an NPZ.")
@sheet_options
@json_option
def replay(
    out: Path,
    split: str,
    state: Path | None,
    step: int | None,
    consumed: int | None,
    epoch: int,
    chain: str | None,
    mix: dict[str, str],
    save: Path | None,
    side: int | None,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show the samples of one training step on one rank, and what the model saw of them.

    Order and augmentation follow from the seed, the epoch and the sample alone, so no log is needed: give the
    arguments of the ShardLoader as they were. After a resume on another number of ranks, --consumed or --state says
    where the batch is. --state takes the loader's `state_dict()` from before the batch, alone or inside a checkpoint,
    and includes the seed of the order. With --shuffle false, --seed still seeds the transform.

    \b
    shardio replay out/ --batch-size 256 --seed 1 --epoch 3 --step 1234 \\
        --rank 3 --world-size 64
    shardio replay out/ --batch-size 256 --state checkpoint.pt \\
        --transform deit3 -o batch.png
    """
    from shardio.loading.loader import ShardLoader
    from shardio.order.orders import BlockShuffle
    from shardio.reading.sample import captions_of

    if [step, consumed, state].count(None) < 2:
        raise click.UsageError("--step, --consumed and --state all say where the batch is: give only one of them")
    there = None if state is None else _read_state(state)
    if there is not None:
        sets = there.get("sets")
        told = {**sets[0], **there} if isinstance(sets, list) and sets and isinstance(sets[0], dict) else there
        options |= {name: told[name] for name in ("seed", "shuffle") if name in told}
        if options["shuffle"] == "block":
            options["shuffle"] = BlockShuffle(told.get("block_size", 0), told.get("window_blocks", 0))
        split = told.get("split", split)
        options["repeats"] = there.get("repeats", options["repeats"])
        if "endless" in there:
            there = {**there, "batch": 0}  # how many batches are left in the epoch does not matter
            options["epoch_batches"] = 1
    try:
        mixed = {str(out): Fraction(1), **{path: Fraction(share) for path, share in mix.items()}}
        options |= {"device": "cpu", "prefetch": 0, "num_threads": 1, "return_indices": True}
        opened = ShardLoader(mixed if mix else out, split=split, **options)
    except TypeError as error:
        if state is None:
            raise
        raise ValueError(f"{state}: {error}") from None
    with opened as loader:
        if chain is not None:
            loader.transform = read_chain(chain, len(loader.shards.classes))
        _go_to(loader, there, epoch, step or 0, consumed)
        found = loader.state_dict()
        batch = next(iter(loader), None)
        if batch is None:
            raise ValueError(
                f"the epoch has no batch at this place: expected one of its {len(loader)} steps on each rank"
            )
        views, parts = _parts(batch, has_images=loader.shards.has_pixels)
        numbers = parts["indices"].tolist()
        if save is not None:
            _save(save, {**({"images": views} if views else {}), **parts})
        if output is not None:
            if not views:
                raise ValueError(f"{out}: expected a set with pixels to draw, found arrays alone: use --save")
            pictures = [picture for view in views for picture in levels_of(view, loader.transform)]
            captions = captions_of(loader.shards, parts["indices"].numpy()) * len(views)
            show_sheet(pictures, captions, output, side=side)
        _tell(loader, found, numbers, as_json)


def _read_state(path: Path) -> Mapping[str, Any]:
    """Returns the loader's state in a file: JSON or a checkpoint of torch.save. Returns the first state it contains."""
    from shardio.system.opening import read_untrusted

    try:
        document = json.loads(read_untrusted(path)) if path.suffix == ".json" else _load_checkpoint(path)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON or a checkpoint of torch, found neither: {error}") from None
    for found in _states_in(document):
        return found
    raise ValueError(f"{path}: the file contains no state that state_dict() of a ShardLoader returned")


def _load_checkpoint(path: Path) -> Any:
    import torch

    from shardio.system.opening import open_untrusted

    open_untrusted(os.path.realpath(path)).close()  # torch opens it by its name, which may be a link to the last one
    try:
        return torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # of a dozen types, as a file is no checkpoint in many ways
        raise ValueError(str(error).partition("\n")[0]) from None


def _states_in(value: object, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    if depth == _MOST_DEPTH or not isinstance(value, (Mapping, list, tuple)):
        return
    if isinstance(value, Mapping) and {"order_version", "epoch", "consumed"} <= value.keys():
        yield value
    for part in value.values() if isinstance(value, Mapping) else value:
        yield from _states_in(part, depth + 1)


def _go_to(loader: ShardLoader, state: Mapping[str, Any] | None, epoch: int, step: int, consumed: int | None) -> None:
    if state is None:
        if consumed is None and step >= len(loader):
            raise ValueError(f"--step must be from 0 to {len(loader) - 1}, the steps of an epoch; found {step}")
        loader.set_epoch(epoch)
        place = loader.state_dict()
        before = place["consumed"] + step * loader.batch_size * loader.world.world_size
        place["consumed"] = before if consumed is None else consumed
        state = {**place, "batch": step} if "batch" in place else place
    loader.load_state_dict(state)


def _parts(batch: tuple[Any, ...], *, has_images: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the views of a batch's images, or () without images, and the other parts by name."""
    parts = list(batch)
    more = parts.pop() if isinstance(parts[-1], dict) else {}
    named = {"indices": parts.pop()}
    images = parts.pop(0) if has_images else ()
    if parts:
        named["labels"] = parts[0]
    return images if isinstance(images, tuple) else (images,), {**named, **more}


def _save(path: Path, parts: Mapping[str, Any]) -> None:
    import io

    import numpy as np

    from shardio.system.files import write_output

    arrays = {}
    for name, part in parts.items():
        views = part if isinstance(part, tuple) else (part,)
        arrays.update({f"{name}_{i}" if views[1:] else name: _as_numpy(view) for i, view in enumerate(views)})
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_output(path, buffer.getvalue())


def _as_numpy(tensor: Any) -> Any:
    import torch

    # NumPy has no bfloat16, and float32 holds all of its numbers.
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _tell(loader: ShardLoader, state: Mapping[str, Any], numbers: Sequence[int], as_json: bool) -> None:
    import numpy as np

    from shardio.reading.sample import class_text

    shards, indices = loader.shards, np.array(numbers, np.int64)
    keys = [os.fsdecode(key) for key in shards.column_of("key", indices).tolist()]
    labels = [None] * len(keys) if shards.label_row is None else shards.labels_of(indices).tolist()
    if as_json:
        show({**state, "rank": loader.world.rank, "indices": list(numbers), "labels": labels, "keys": keys})
        return
    names = shards.class_names
    classes = [class_text(label, names) for label in labels]
    show(table({"sample": [*map(str, numbers)], "class": classes, "key": keys}, right=["sample"]))
    say(
        f"epoch {state['epoch']}, after {state['consumed']:,} samples of all ranks; rank {loader.world.rank} of "
        f"{loader.world.world_size}"
    )
