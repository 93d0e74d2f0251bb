"""Mistakes with the folders of a call, told in words: a URL where a folder must be, or two in the wrong order."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from shardio.errors import SetNotFoundError, ShardioError
from shardio.format import MANIFEST_NAME, WORK_FOLDER

# As it is written, and as a Path has it, which makes one slash of two.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+:)/+")


def check_local(path: str | os.PathLike[str], error: type[ShardioError], way_out: str) -> None:
    """Raise `error` if the path is a URL, of which a folder of this name would be made."""
    text = os.fspath(path)
    if (match := _URL.match(text)) and not os.path.lexists(match[1]):
        raise error(f"{match[1]}//...: expected a path on this machine, found a URL: {way_out}")


def holds_set(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder looks like a shard set, finished or not."""
    return any(os.path.lexists(os.path.join(folder, name)) for name in (MANIFEST_NAME, WORK_FOLDER))


@contextlib.contextmanager
def hinting_at_order(second: str | os.PathLike[str], hint: str) -> Iterator[None]:
    """Give a SetNotFoundError from inside the block the hint, if the other folder of the call is a set."""
    try:
        yield
    except SetNotFoundError as error:
        if holds_set(second):
            raise SetNotFoundError(f"{error}. {os.fspath(second)} is a set: {hint}") from None
        raise
