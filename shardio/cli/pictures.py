"""Shared by commands that show samples: chains of transforms, pixel levels, and the output of a sheet."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardio.cli.options import output_file, together
from shardio.cli.output import say

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from shardio.augment import Transform

sheet_options = together(
    click.option("--side", type=click.IntRange(1, 4096), help="Longer side of a picture on the sheet, in pixels."),
    click.option("-o", "--output", type=output_file, help="Write the sheet to this PNG file instead of the terminal."),
)


def read_chain(text: str, num_classes: int) -> Transform:
    """Returns the recipe named `text`, for `num_classes` classes, or the transform in the JSON file `text`.

    The file has the dict that `to_dict` of the transform returned. Raises ValueError if `text` is neither.
    """
    from shardio.augment import Transform, from_dict, recipe
    from shardio.system.opening import read_untrusted

    if not text.endswith(".json") and not os.path.exists(text):
        try:
            return recipe(text, num_classes=num_classes)
        except ValueError as error:
            if num_classes:
                raise
            raise ValueError(f"{text}, for a set without classes: {error}") from None
    try:
        made = from_dict(json.loads(read_untrusted(Path(text))))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{text}: expected JSON that `to_dict` of a transform returned: {error}") from None
    if not isinstance(made, Transform):
        raise ValueError(f"{text}: expected a transform, found {type(made).__name__}")
    return made


def normalizes(transform: object) -> Iterator[Any]:
    """Yields the Normalize transforms of a chain."""
    from shardio.augment import Normalize

    if isinstance(transform, Normalize):
        yield transform
    if is_dataclass(transform):
        for field in fields(transform):
            value = getattr(transform, field.name)
            for part in value if isinstance(value, tuple) else (value,):
                yield from normalizes(part)


def levels_of(images: torch.Tensor, transform: object = None) -> NDArray[np.uint8]:
    """Returns pictures (B, C, H, W) of any dtype as uint8 (B, H, W, C), and undoes the transform's Normalize.

    Floating-point levels are from 0 for black to 1 for white.
    """
    import torch

    if images.dtype != torch.uint8:
        images = images.float()
        for normalize in normalizes(transform):
            mean, std = (torch.tensor(numbers)[:, None, None] for numbers in normalize.statistics)
            images = images * std + mean
            break
        images = (images * 255).round().clamp(0, 255).to(torch.uint8)
    levels: NDArray[np.uint8] = images.permute(0, 2, 3, 1).contiguous().cpu().numpy()
    return levels


def show_sheet(
    pictures: Sequence[NDArray[np.uint8]],
    captions: Sequence[str],
    output: Path | None,
    *,
    side: int | None,
    group: int = 1,
    per_row: int | None = None,
) -> None:
    """Writes a sheet of pictures to a file, or draws the pictures in the terminal.

    A sheet has `per_row` pictures in a row, whose longer side is `side` pixels. In a terminal, a row ends at the end of
    a group of `group` pictures, if a group fits. Raises ValueError if `output` is None and stdout is no terminal.
    """
    from shardio.drawing.sheet import sheet
    from shardio.drawing.terminal import in_blocks
    from shardio.system.files import write_output

    if output is not None:
        image = sheet(pictures, captions, columns=per_row, side=side)
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        write_output(output, buffer.getvalue())
        say(f"{output}: {image.width} x {image.height} pixels")
        return
    if not sys.stdout.isatty():
        raise ValueError("stdout is not a terminal: write the sheet to a file, with --output sheet.png")
    for line in in_blocks(pictures, captions, shutil.get_terminal_size().columns, group=group):
        click.echo(line)
