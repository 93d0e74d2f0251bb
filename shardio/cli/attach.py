"""`shardio attach`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from shardio.cli.changed import change_options, new_argument, run_change, split_option
from shardio.cli.options import folder, set_argument

if TYPE_CHECKING:
    from shardio.format.layout import ArrayKind


def _parse_arrays(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, Path]:
    arrays: dict[str, Path] = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not (name and equals and path) or name in arrays:
            found = "twice" if name in arrays else repr(value)
            raise click.BadParameter(f"expected NAME=FILE.npy, each name once; found {found}")
        arrays[name] = Path(path)
    return arrays


def _parse_kinds(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, ArrayKind]:
    from shardio.format.layout import ArrayKind

    kinds: dict[str, ArrayKind] = {}
    for value in values:
        name, _, kind = value.rpartition("=")
        if kind not in get_args(ArrayKind) or name in kinds:
            raise click.BadParameter(
                f"expected KIND, or NAME=KIND, of {', '.join(get_args(ArrayKind))}; found {value!r}"
            )
        kinds[name] = kind  # type: ignore[assignment]
    return kinds


@click.command(short_help="Add arrays to a set, in a new one.")
@set_argument
@new_argument
@click.option(
    "--array",
    "arrays",
    multiple=True,
    required=True,
    callback=_parse_arrays,
    metavar="NAME=FILE.npy",
    help="One row for each sample, in their order; several times for several.",
)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    callback=_parse_kinds,
    metavar="[NAME=]KIND",
    help="What the values are to the pictures: array, mask, boxes or image.  [default: array]",
)
@split_option
@click.option(
    "--by",
    type=folder,
    metavar="FILE",
    help="Keys of the rows: one in each line, or an NPY or NPZ file.",
)
@click.option("--replace", is_flag=True, help="Replace arrays that have these names.")
@change_options
def attach(out: Path, new: Path, arrays: dict[str, Path], kinds: dict[str, ArrayKind], **options: Any) -> None:
    """Make a new set in NEW of the set in OUT, with more arrays: embeddings, masks, boxes, scores.

    Files that stay are shared between both sets by hard links. NEW appears whole or not at all; OUT stays as it is.
    """
    from shardio.changes.attach import attach as attach_arrays

    every = kinds.pop("", "array")
    run_change(attach_arrays, out, new, arrays, kinds={**dict.fromkeys(arrays, every), **kinds}, **options)
