"""Detects mistakes with the folders of a call: a URL, two in the wrong order, an OUT that holds other things."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from shardio.errors import ConvertError, SetNotFoundError, ShardioError
from shardio.format.layout import MANIFEST_NAME, WORK_FOLDER
from shardio.system.files import is_temporary
from shardio.system.opening import kind_at

PLAN_NAME = "plan.json"
"""The file in the work folder that says which conversion is under way."""

# As it is written, and as a Path has it, which makes one slash of two.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+:)/+")


def check_local(path: str | os.PathLike[str], error: type[ShardioError], way_out: str) -> None:
    """Raises `error` if the path is a URL: a folder of this name would be made."""
    text = os.fspath(path)
    if (match := _URL.match(text)) and not os.path.lexists(match[1]):
        raise error(f"{match[1]}//...: expected a path on this machine, found a URL: {way_out}")


def check_apart(src: Path, out: Path) -> None:
    """Raises ConvertError if one of the two folders is inside the other."""
    real_src, real_out = src.resolve(), out.resolve()
    if real_src == real_out or real_src in real_out.parents or real_out in real_src.parents:
        raise ConvertError(f"{out}: expected a folder apart from the images' {src}, found one inside the other")


def check_usable(out: Path) -> None:
    """Raises ConvertError if no conversion at all can have OUT."""
    if os.path.lexists(out) and not out.is_dir():
        raise ConvertError(f"{out}: expected a folder or nothing, found {kind_at(out)}")
    try:
        check_free(out)
    except ConvertError:
        if not os.path.lexists(out / MANIFEST_NAME):  # which may have come meanwhile
            raise


def check_free(out: Path) -> None:
    """Raises ConvertError if there is anything in OUT but an unfinished conversion."""
    listed = os.listdir(out) if out.is_dir() else []
    found = sorted(name for name in listed if name != WORK_FOLDER and not is_temporary(name))
    # The plan is looked for last: another process that began meanwhile may have made shards.
    if found and not (out / WORK_FOLDER / PLAN_NAME).exists():
        raise ConvertError(
            f"{out}: expected no folder, an empty one or an unfinished conversion; found {found[0]!r} in it. "
            "Convert into a new folder (SRC, the images, comes first, and OUT second)"
        )


def looks_like_a_set(folder: str | os.PathLike[str]) -> bool:
    """Returns whether the folder looks like a shard set, finished or not."""
    return any(os.path.lexists(os.path.join(folder, name)) for name in (MANIFEST_NAME, WORK_FOLDER))


@contextlib.contextmanager
def hinting_at_order(second: str | os.PathLike[str], hint: str) -> Iterator[None]:
    """Gives a SetNotFoundError from inside the block the hint, if the other folder of the call is a set."""
    try:
        yield
    except SetNotFoundError as error:
        if looks_like_a_set(second):
            raise SetNotFoundError(f"{error}. {os.fspath(second)} is a set: {hint}") from None
        raise
