"""Distinguishes URLs from paths, hides credentials in URLs, and checks the folders that a call names."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from shardio.errors import ConvertError, SetNotFoundError, ShardioError
from shardio.format.layout import MANIFEST_NAME, WORK_FOLDER
from shardio.system.files import target_of
from shardio.system.opening import kind_at

PLAN_NAME = "plan.json"
"""The file in the work folder that describes the unfinished conversion."""

_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]*://"
_IS_URL = re.compile(_SCHEME)
_URL_IN_TEXT = re.compile(_SCHEME + r"[^\s'\"<>]+")
# As it is written, and as a Path has it, which makes one slash of two.
_URL_OR_PATH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+:)/+")


def is_url(place: str) -> bool:
    return _IS_URL.match(place) is not None


def without_credentials(url: str) -> str:
    """Returns the URL for a message: without its password, and without its query, which may be a signature."""
    scheme, _, rest = url.partition("://")
    shown = re.split(r"[?#]", rest, maxsplit=1)[0]
    # A password may hold what else ends a host (/ ? #), whether that is allowed or not.
    user, at, after = rest.rpartition("@")
    # A user alone may be a token for http; elsewhere it is a name (abfs://container@account).
    if at and (":" in user or scheme.lower() in ("http", "https")):
        if user.startswith(shown):
            # The @ is in a query if only a host and a path come before it. Otherwise any part may be secret.
            shown = shown if re.fullmatch(r"[^:@/]+/.*", shown, re.DOTALL) else "..."
        else:
            shown = re.split(r"[?#]", after, maxsplit=1)[0]
    return f"{scheme}://{shown}"


def without_credentials_in(text: str) -> str:
    """Returns `text`, which comes from another program, without the credentials of the URLs in it."""
    return _URL_IN_TEXT.sub(lambda match: without_credentials(match[0]), text)


def shown(place: str) -> str:
    """Returns a folder or URL as text for a message, without credentials."""
    return without_credentials(place) if is_url(place) else place


def join_place(place: str, name: str) -> str:
    """Returns the path or URL of the child `name` of `place`. The query of an http URL stays at the end."""
    if place.lower().startswith(("http://", "https://")):
        parts = urlsplit(place)
        return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}", fragment=""))
    return f"{place.rstrip('/')}/{name}"


def resolve(place: str | os.PathLike[str]) -> str:
    """Returns the path or URL of a set without a leading file://, and with a leading ~ expanded."""
    return os.path.expanduser(os.fspath(place).removeprefix("file://"))


def local_folder(place: str | os.PathLike[str]) -> str:
    """Returns the folder `place` after `resolve`; it need not exist. Raises SetNotFoundError if it is a URL."""
    place = resolve(place)
    if is_url(place):
        raise SetNotFoundError(
            f"{without_credentials(place)}: expected a folder, found a URL: copy the set to this machine, such as by "
            "`shardio stage`"
        )
    return place


# --- folders of a call -----------------------------------------------------------------------------------------------


def check_local(path: str | os.PathLike[str], error: type[ShardioError], way_out: str) -> None:
    """Raises `error` if `path` is a URL or begins with ~. `way_out` is the remedy in the message about a URL.

    Without this check, either would be used as the path of a folder here.
    """
    text = os.fspath(path)
    if (match := _URL_OR_PATH.match(text)) and not os.path.lexists(match[1]):
        raise error(f"{match[1]}//...: expected a path on this machine, found a URL: {way_out}")
    if os.path.expanduser(text) != text:
        raise error(f"{text}: expected a path without ~: use os.path.expanduser(), or ./{text} for a folder named ~")


def check_apart(src: Path, out: Path) -> None:
    """Raises ConvertError if one of the two folders is inside the other."""
    real_src, real_out = src.resolve(), out.resolve()
    if real_src == real_out or real_src in real_out.parents or real_out in real_src.parents:
        raise ConvertError(
            f"{out}: expected a folder apart from {src}, the images, found one inside the other: choose another OUT"
        )


def check_usable(out: Path) -> None:
    """Raises ConvertError if a conversion cannot write to `out`. A finished set there is not refused."""
    if os.path.lexists(out) and not out.is_dir():
        raise ConvertError(f"{out}: expected a folder, or a free path for one, found {kind_at(out)}")
    try:
        check_free(out)
    except ConvertError:
        if not os.path.lexists(out / MANIFEST_NAME):  # which may have come meanwhile
            raise


def check_free(out: Path) -> None:
    """Raises ConvertError if `out` contains anything other than an unfinished conversion."""
    listed = os.listdir(out) if out.is_dir() else []
    found = sorted(name for name in listed if name != WORK_FOLDER and not target_of(name))
    # The plan is looked for last: another process that began meanwhile may have made shards.
    if found and not (out / WORK_FOLDER / PLAN_NAME).exists():
        raise ConvertError(
            f"{out}: expected no folder, an empty one or an unfinished conversion; found {found[0]!r} in it. "
            "Convert into a new folder (SRC, the images, comes first, and OUT second)"
        )


def looks_like_a_set(folder: str | os.PathLike[str]) -> bool:
    """Returns whether the folder looks like a shard set, finished or unfinished."""
    return any(os.path.lexists(os.path.join(folder, name)) for name in (MANIFEST_NAME, WORK_FOLDER))


@contextlib.contextmanager
def hinting_at_order(second: str | os.PathLike[str], hint: str) -> Iterator[None]:
    """Adds `hint` to a SetNotFoundError from the block if `second` is a set: the caller probably swapped two folders.

    The block opens the first folder of a command, which should be a set; `second` is the other folder.
    """
    try:
        yield
    except SetNotFoundError as error:
        if looks_like_a_set(second):
            raise SetNotFoundError(f"{error}. {os.fspath(second)} is a set: {hint}") from None
        raise
