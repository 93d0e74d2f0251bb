"""The commands `shardio bench` (how fast a set is read) and `shardio replay` (which samples a step read)."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from shardio.cli.options import (
    CommonFirst,
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
from shardio.errors import counted, first_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shardio.loading.loader import ShardLoader
    from shardio.measure.bench import BenchResult
    from shardio.order.orders import Shuffle


_IN_STATES = "split", "seed", "shuffle", "repeats", "epoch"


@click.command(
    cls=CommonFirst,
    short_help="Measure how fast this machine reads a set.",
    common=("split", "batch_size", "num_threads", "io", "device", "chain"),
)
@set_argument
@split_option
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    show_default="256, or all samples if there are fewer",
    help="Samples per batch.",
)
@click.option(
    "--threads", "num_threads", type=click.IntRange(1), show_default="the loader's choice", help="Gather threads."
)
@click.option("--io", metavar="auto|mmap|pread|direct", default="auto", help="How samples are read.")
@click.option("--prefetch", type=click.IntRange(0), default=2, help="Batches prepared ahead of the training loop.")
@click.option("--device", metavar="cpu|cuda|cuda:N", default="cpu", help="Device of the batches.")
@click.option(
    "--transform",
    "chain",
    metavar="CHAIN",
    help="The training's transform: a recipe, or a JSON file of to_dict().",
)
@mix_option
@click.option("--rounds", type=click.IntRange(1), default=7, help="Figures are medians over these rounds.")
@click.option(
    "--seconds", type=click.FloatRange(0.01), default=0.5, help="Seconds per measurement, and again for its warm-up."
)
@json_option
def bench(out: Path, split: str, chain: str | None, as_json: bool, **options: Any) -> None:
    """Measure how fast a loader reads the set in OUT, compared with the limits of this machine.

    Each round measures the loader and each limit once. A ratio is the speed of the loader divided by the speed of a
    limit in the same round. The limits are:

    \b
    memcpy   one large block, copied in memory by one thread
    take     np.take(out=, mode="clip") of random samples into slots like the
             loader's, by one thread
    direct   random samples from the disk past the page cache (O_DIRECT), by
             8 threads
    pinned   a bare copy of batches from pinned memory to the GPU

    With --io mmap or pread, each measurement reads its samples twice and times the second pass: samples then come from
    the page cache, as in every epoch but the first if the set fits there. --io direct reads from the disk.
    """
    import shardio.measure.bench as benchmark
    from shardio.reading.shardset import open_shards
    from shardio.system.progress import Bar

    with Bar(unit=" turns") as bar:
        shards = open_shards(out, split)
        transform = None if chain is None else read_chain(chain, len(shards.classes))
        result = benchmark.bench(out, split=split, transform=transform, on_turn=bar.reach, **options)
    show(result.to_dict() if as_json else summary(result))


def summary(result: BenchResult) -> Iterator[str]:
    """Yields the lines that summarize a benchmark, at most 100 characters each unless the set's path is long."""
    from shardio.measure.limits import DIRECT_THREADS

    shape, machine, options = " x ".join(map(str, result.sample_shape)), result.machine, result.options
    shape += " bytes of arrays" if len(result.sample_shape) == 1 else ""
    cached = "" if result.resident_share is None else f", {result.resident_share:.0%} in the page cache before"
    gpu = "" if machine["gpu"] is None else f", {options['device']}: {machine['gpu']}"
    yield f"{result.path}, {result.split}: {counted(result.num_samples, 'sample')} of {shape}"
    yield f"{machine['filesystem']}{cached}; {machine['cores']} cores{gpu}"
    yield f"medians of {counted(result.rounds, 'round')}, {result.seconds:g} s each"
    yield ""
    names = {
        "memcpy": "memcpy of one large block",
        "take": f"np.take into slots, batch {options['batch_size']}",
        "direct": f"O_DIRECT reads, {DIRECT_THREADS} threads",
        "pinned_copy": f"pinned copy to {options['device']}, batch {options['batch_size']}",
    }
    rows = {names[kind]: speed for kind, speed in result.limits.items()} | {"ShardLoader": result.loader}
    speeds, title = rows.values(), "samples/s" if len(result.sample_shape) == 1 else "images/s"
    ratios = [_short(result.loader.ratio_to(speed)) for speed in result.limits.values()]
    columns = {
        "": [*rows],
        title: [f"{speed.images_per_second:,.0f}" for speed in speeds],
        "GB/s": [_short(result.gigabytes_per_second(speed)) for speed in speeds],
        "CPU us/image": [_short(speed.cpu_microseconds_per_image) for speed in speeds],
        "loader's ratio": [*ratios, ""],
    }
    yield from table(columns, right=[*columns][1:])
    if "direct" in result.left_out:
        yield f"left out: O_DIRECT reads: {result.left_out['direct']}"
    yield ""
    first = statistics.median(result.first_batch_seconds) * 1000
    given = {"device": "device", "batch_size": "batch", "num_threads": "threads", "prefetch": "prefetch", "io": "io"}
    yield f"ShardLoader: {', '.join(f'{word} {options[name]}' for name, word in given.items())}"
    yield f"  {options['io_reason']}"
    yield f"  {first:.0f} ms from opening the set to the first batch"


def _short(value: float) -> str:
    """Returns a number as text with about three digits."""
    decimals = next((count for count, least in enumerate((100, 10, 0.1)) if value >= least), 3)
    return f"{value:,.{decimals}f}"


def _parse_shuffle(text: str) -> Shuffle:
    from shardio.order.orders import BlockShuffle

    if text in ("true", "false"):
        return text == "true"
    if text == "block":
        return BlockShuffle()
    if found := re.fullmatch("block:([1-9][0-9]*),([1-9][0-9]*)", text):
        return BlockShuffle(*map(int, found.groups()))
    raise ValueError("true, false, block, or block:SIZE,WINDOW such as block:32,256")


@click.command(
    cls=CommonFirst,
    short_help="Show the batch of a training step.",
    common=("split", "batch_size", "epoch", "step", "state", "seed", "chain", "output"),
)
@set_argument
@split_option
@click.option("--batch-size", type=click.IntRange(1), required=True, help="Batch size of one rank.")
@click.option("--epoch", type=click.IntRange(0), default=0)
@click.option("--step", type=click.IntRange(0), help="Number of the step in the epoch, from 0.  [default: 0]")
@click.option(
    "--consumed",
    type=click.IntRange(0),
    help="Samples that all ranks read in the epoch before this batch, instead of --step.",
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
@click.option("--tail", type=click.Choice(["drop", "pad", "short"]), default="drop", help="As in ShardLoader.")
@click.option("--epoch-batches", type=click.IntRange(1), metavar="N", help="As in ShardLoader.")
@click.option("--repeats", type=click.IntRange(1), default=1, help="As in ShardLoader.")
@mix_option
@click.option("--transform", "chain", metavar="CHAIN", help="A recipe, or a JSON file of the transform's to_dict().")
@click.option("--save", type=output_file, help="Write the batch to this NPZ file.")
@sheet_options
@json_option
def replay(
    out: Path,
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

    Order and augmentation depend only on the seed, the epoch and the sample, so no log is needed: give the arguments
    that the ShardLoader had. After a resume on another number of ranks, --consumed or --state says
    where the batch is. --state takes the loader's `state_dict()` from before the batch, alone or inside a checkpoint,
    and includes the seed of the order; of several states, --split chooses. With --shuffle false, --seed still seeds the
    transform.

    \b
    shardio replay out/ --batch-size 256 --seed 1 --epoch 3 --step 1234 \\
        --rank 3 --world-size 64
    shardio replay out/ --batch-size 256 --state checkpoint.pt \\
        --transform deit3 -o batch.png
    """
    from shardio.loading.loader import ShardLoader
    from shardio.reading.sample import captions_of

    if [step, consumed, state].count(None) < 2:
        raise click.UsageError("--step, --consumed and --state all say where the batch is: give only one of them")
    source = click.get_current_context().get_parameter_source
    given = {**options, "epoch": epoch}
    given = {name: given[name] for name in _IN_STATES if source(name) is ParameterSource.COMMANDLINE}
    saved = None if state is None else _read_state(state, given)
    if saved is not None:
        options |= {name: value for name, value in _options_of(saved).items() if name in options}
        if "endless" in saved:
            saved = {**saved, "batch": 0}  # how many batches are left in the epoch does not matter
            options["epoch_batches"] = 1
    try:
        mixed = {str(out): Fraction(1), **{path: Fraction(share) for path, share in mix.items()}}
        options |= {"device": "cpu", "prefetch": 0, "num_threads": 1, "return_indices": True}
        opened = ShardLoader(mixed if mix else out, **options)
    except TypeError as error:
        if state is None:
            raise
        raise ValueError(f"{state}: {error}") from None
    with opened as loader:
        if chain is not None:
            loader.transform = read_chain(chain, len(loader.shards.classes))
        _go_to(loader, saved, epoch, step or 0, consumed)
        found = loader.state_dict()
        batch = next(iter(loader), None)
        if batch is None:
            raise ValueError(
                f"the epoch has only {len(loader)} batches on each rank: give an earlier --step, --consumed or --state"
            )
        views, parts = _parts(batch, has_images=loader.shards.has_pixels)
        indices = parts["indices"].numpy()
        if save is not None:
            _save(save, {**({"images": views} if views else {}), **parts})
        if output is not None:
            if not views:
                raise ValueError(f"{out}: --output needs images, but the set has only arrays: use --save")
            levels = (levels_of(images, loader.transform, view) for view, images in enumerate(views))
            pictures = [picture for of_view in levels for picture in of_view]
            show_sheet(pictures, captions_of(loader.shards, indices) * len(views), output, side=side)
        _tell(loader, found, indices, as_json)


def _read_state(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the only loader state in a file that has the values of the options `given`. The file is JSON, or a
    checkpoint that torch.save wrote."""
    from shardio.loading.state import plain
    from shardio.system.opening import read_untrusted

    try:
        document = json.loads(read_untrusted(path)) if path.suffix == ".json" else _load_checkpoint(path)
        there = map(dict, map(plain, _states_in(document)))
        states = list({json.dumps(one, sort_keys=True, default=repr): one for one in there}.values())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: cannot be read as JSON (*.json) or as a torch checkpoint (other names): {error}"
        ) from None
    if not states:
        raise ValueError(f"{path}: contains no state that `state_dict()` of a ShardLoader returned")
    # Types count, and comparing arrays, say, does not return a bool.
    fitting = [one for one in states if all(repr(given.get(n, v)) == repr(v) for n, v in _options_of(one).items())]
    if len(fitting) != 1:
        expected = "".join(f" --{name} {value}" for name, value in given.items()) or " no option"
        found = first_of(states, 3, lambda one: f"{_options_of(one)!r:.150}")
        raise ValueError(
            f"{path}: expected one state with{expected}, found {found}: choose a state by --split, leave out an option "
            "that contradicts it, or save it alone in a JSON file"
        )
    return fitting[0]


def _options_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of `replay` that a state decides."""
    from shardio.order.orders import BlockShuffle

    sets = state.get("sets")
    described = {**sets[0], **state} if isinstance(sets, list) and sets and isinstance(sets[0], dict) else state
    found = {name: described[name] for name in _IN_STATES if name in described}
    if found.get("shuffle") == "block":
        found["shuffle"] = BlockShuffle(described.get("block_size", 0), described.get("window_blocks", 0))
    return found


def _load_checkpoint(path: Path) -> Any:
    import torch

    from shardio.system.opening import open_untrusted

    open_untrusted(os.path.realpath(path)).close()  # torch opens it by its name, which may be a link to the last one
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # of a dozen types, and torch's advice is about options that this command has not
        raise ValueError(
            f"torch.load with weights_only=True raised {type(error).__name__}: if the file is a checkpoint, save the "
            "loader's state_dict() without objects of your own classes"
        ) from None


def _states_in(value: object, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yields the states of loaders in a checkpoint, at most ten levels deep."""
    if depth == 10 or not isinstance(value, (Mapping, list, tuple)):
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
    """Returns (views of the images, other parts by name) of a batch. Views are () if the set has no pixels."""
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
    import torch

    from shardio.system.files import write_output

    arrays = {}
    for name, part in parts.items():
        for i, view in enumerate(views := part if isinstance(part, tuple) else (part,)):
            # NumPy has no bfloat16, and float32 holds all of its numbers.
            numbers = view.float() if view.dtype == torch.bfloat16 else view
            arrays[f"{name}_{i}" if views[1:] else name] = numbers.numpy()
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_output(path, buffer.getvalue())


def _tell(loader: ShardLoader, state: Mapping[str, Any], indices: NDArray[np.int64], as_json: bool) -> None:
    """Prints the samples `indices` of a batch, as JSON or a table. `state` is the loader's state before the batch."""
    from shardio.reading.sample import class_text

    shards, numbers = loader.shards, indices.tolist()
    keys = [os.fsdecode(key) for key in shards.column_of("key", indices).tolist()]
    labels = [None] * len(keys) if shards.label_row is None else shards.labels_of(indices).tolist()
    if as_json:
        show({**state, "rank": loader.world.rank, "indices": numbers, "labels": labels, "keys": keys})
        return
    classes = [class_text(label, shards.class_names) for label in labels]
    show(table({"sample": list(map(str, numbers)), "class": classes, "key": keys}, right=["sample"]))
    say(
        f"epoch {state['epoch']}, after {state['consumed']:,} samples of all ranks; rank {loader.world.rank} of "
        f"{loader.world.world_size}"
    )
