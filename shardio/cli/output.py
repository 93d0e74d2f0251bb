"""The output of commands: lines, JSON, tables, human-readable amounts, and sheets of pictures."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shlex
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardio.errors import printable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from _typeshed import DataclassInstance
    from numpy.typing import NDArray

# Nothing is printed about servers that answer sooner.
_TELL_SECONDS = 5.0


def say(line: str, err: bool = False) -> None:
    """Prints one line, to stderr with `err`. Escapes invisible characters."""
    click.echo(printable(line), err=err)


def show(result: Mapping[str, Any] | DataclassInstance | Iterable[str]) -> None:
    """Prints the result of a command: a mapping or dataclass as one JSON object, or lines of text."""
    if dataclasses.is_dataclass(result):
        result = dataclasses.asdict(result)
    if isinstance(result, Mapping):
        click.echo(json.dumps(result))
        return
    for line in result:
        say(line)


def next_step(*words: object) -> str:
    """Returns a line "next: shardio ..." that suggests the next command, quoted for a shell."""
    paths = (f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word) for word in words)
    return "next: " + shlex.join(["shardio", *paths])


def table(columns: Mapping[str, Sequence[str]], right: Sequence[str] = (), indent: str = "") -> Iterator[str]:
    """Yields the lines of a table. `columns` has the cells of each column by title; columns in `right` align right."""
    padded = []
    for title, cells in columns.items():
        texts = [title, *cells]
        widest = max(map(len, texts))
        padded.append([text.rjust(widest) if title in right else text.ljust(widest) for text in texts])
    for row in zip(*padded, strict=True):
        yield indent + "  ".join(row).rstrip()


def counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


@contextlib.contextmanager
def telling_of_servers(paths: Sequence[str]) -> Iterator[None]:
    """If the block takes more than 5 seconds, prints which URLs of `paths` it waits for, and for how long at most."""
    from shardio.sets.names import is_url, without_credentials
    from shardio.sets.remote import SMALL_FILE_SECONDS

    names = ", ".join(without_credentials(path) for path in paths if is_url(path))
    line = f"shardio: still waiting for {names}: for each manifest and listing at most {SMALL_FILE_SECONDS:g} seconds"
    timer = threading.Timer(_TELL_SECONDS, say, [line], {"err": True})
    timer.daemon = True
    if names:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def levels_of(images: torch.Tensor, transform: object = None, view: int = 0) -> NDArray[np.uint8]:
    """Returns a batch of images (B, C, H, W) as uint8 pictures (B, H, W, C). uint8 images keep their levels. In other
    dtypes, levels are taken to be 0 for black to 1 for white, after the Normalize that `transform` has for this `view`
    was undone; without a Normalize, they are up to 255 if a ToDtype of `transform` does not scale."""
    import torch

    from shardio.augment import Normalize, PerSample, ToDtype, Transform

    if images.dtype != torch.uint8:
        images = images.float()
        parts = [*transform.with_inner(view)] if isinstance(transform, Transform) else []
        cast = next((part for part in parts if isinstance(part, ToDtype | PerSample)), None)
        if (normalize := next((part for part in parts if isinstance(part, Normalize)), None)) is not None:
            mean, std = (torch.tensor(numbers)[:, None, None] for numbers in normalize.statistics)
            images = images * std + mean
        elif isinstance(cast, ToDtype) and not cast.scale:
            images = images / 255
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
    """Writes the pictures with their captions to the PNG file `output`; without it, draws them in the terminal.

    In the PNG, a row has `per_row` pictures, and the longer side of each picture is `side` pixels. In the terminal, a
    row has whole groups of `group` pictures if a group fits. Raises ValueError without `output` if stdout is no
    terminal.
    """
    from shardio.drawing.sheet import in_blocks, sheet
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
