"""Reads published sets in an object store or on a web server, at any URL that fsspec supports.

It requests ranges of files and checks how many bytes come, since servers and proxies may silently send fewer. Transient
errors are retried after growing waits. No message shows the user, password or signature in a URL.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import random
import re
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit, urlunsplit

from shardio.errors import SetNotFoundError, printable
from shardio.format.entries import FileEntry
from shardio.format.layout import MANIFEST_NAME
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import check_manifest_nbytes, manifest_of
from shardio.format.opening import wrong_size
from shardio.sets.names import join_place, without_credentials, without_credentials_in
from shardio.system.opening import missing_file

# A throttled or restarting server is back within a minute, or something is wrong with it.
_PATIENCE_SECONDS = 60.0
_FIRST_WAIT_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 8.0
# For a whole manifest or listing, including retries. People investigate before they wait longer.
SMALL_FILE_SECONDS = 60.0
# The longest wait for the next piece of an index or a shard. The whole may take longer.
_SILENCE_SECONDS = 60.0
# Between two looks whether a request is still wanted.
_LOOK_SECONDS = 0.1
# More in one request would be in memory twice while it is copied, and be lost as a whole when a connection is cut.
_REQUEST_NBYTES = 32 << 20
# A web server's page of links, which has no length beforehand: some 20,000 sets.
_LISTING_NBYTES = 4 << 20
# A link to a folder. The bound keeps a hostile page from taking quadratic time.
_FOLDER_LINK = re.compile(r"""\bhref\s*=\s*["']?([^\s"'<>?#]{1,1000})/["'\s>]""", re.IGNORECASE)
# Ranks and nodes that failed together must not retry together. A generator of its own, as a job may seed the other.
_JITTER = random.SystemRandom()

# Another attempt would end the same way. Other errors of these kinds may pass: not all that fails has a number.
_FINAL_ERRNOS = {
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR),
    *(errno.EINVAL, errno.ENOSYS, errno.ENAMETOOLONG),
}
_FINAL_ERRORS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError)
# The request came too slowly, too early, or too soon after others.
_PASSING_STATUSES = (408, 425, 429)
# The error of a server that is away or fails. Not EIO, which says that these very bytes are lost.
_SERVER_FAILED = errno.EHOSTUNREACH
_ERRNO_OF_STATUS = {
    **dict.fromkeys((401, 403, 407), errno.EACCES),
    **dict.fromkeys((404, 410), errno.ENOENT),
    416: errno.EINVAL,
}
_ACCESS_HINT = (
    ". Are credentials set, and do they allow reading? Without permission to list, an object store reports a missing "
    "file in the same way"
)

T = TypeVar("T")

# fsspec's filesystems by process, scheme, and host or bucket. A forked process makes its own, as the thread that serves
# the connections stays in the parent. It keeps the parent's: only that thread could close them.
_filesystems: dict[tuple[int, str, str], Any] = {}


class RemoteStorage:
    """Reads sets at a URL, with the methods of `storage.FolderStorage`. Thread safe, picklable, usable after a fork.

    fsspec reads endpoint, credentials and proxy from the environment or from its configuration files.

    Raises SetNotFoundError if a package that the URL needs is missing, ValueError if fsspec does not know the scheme.
    """

    def __init__(self, url: str) -> None:
        self.name = without_credentials(url)
        self._url = url
        self._closed = False
        self.damaged: set[str] = set()
        self.changed: set[str] = set()
        self._heard: dict[str, tuple[str, str]] = {}  # the ETag and the size in the last answer, by file
        self._is_http = url.lower().startswith(("http://", "https://"))
        _filesystem(url)

    def load_manifest(self, digest: str | None = None) -> Manifest:
        path = join_place(self.name, MANIFEST_NAME)
        deadline = time.monotonic() + SMALL_FILE_SECONDS
        try:
            nbytes = self._size_of(MANIFEST_NAME, deadline)
            check_manifest_nbytes(path, nbytes)
            data = bytearray(nbytes)
            self._read_into(MANIFEST_NAME, 0, memoryview(data), deadline)
        except FileNotFoundError:
            raise SetNotFoundError(f"{path}: not found: no shard set is there: check the URL") from None
        return manifest_of(path, bytes(data), digest)

    def path_of(self, entry: FileEntry) -> str:
        return join_place(self.name, entry.file)

    def find_fault(self, manifest: Manifest) -> str:
        if self._is_http:
            return ""
        try:
            listed = self._list()
        except PermissionError:  # a store may let its files be read and not be listed
            return ""
        sizes: dict[str, Any] = {str(item["name"]).rpartition("/")[2]: item.get("size") for item in listed}
        for entry in manifest.files:
            if entry.file not in sizes:
                return str(missing_file(self.path_of(entry)))
            if (nbytes := sizes[entry.file]) not in (None, entry.nbytes):
                return str(wrong_size(self.path_of(entry), entry, nbytes))
        return ""

    def read_into(self, entry: FileEntry, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` with the file's bytes from `offset` on. Only checksums show whether they are right."""
        try:
            try:
                self._read_into(entry.file, offset, buffer)
            except OSError as error:
                # For some servers, a range that is not in the file is an invalid argument.
                if error.errno == errno.EINVAL and (nbytes := self._size_of(entry.file)) != entry.nbytes:
                    raise wrong_size(self.path_of(entry), entry, nbytes) from None
                raise
        except FileNotFoundError:
            raise missing_file(self.path_of(entry)) from None
        size = self._heard.get(entry.file, ("", ""))[1]
        if size.isdecimal() and int(size) != entry.nbytes:
            raise wrong_size(self.path_of(entry), entry, int(size))

    def close(self) -> None:
        """Makes running and later requests fail. Connections stay open, as all sets of the same host share them."""
        self._closed = True

    def list_folders(self) -> list[str]:
        if self._is_http:
            base = urlunsplit(urlsplit(join_place(self._url, ""))._replace(query=""))
            found = {urljoin(base, link) for link in _FOLDER_LINK.findall(self._list())}
            names = {link.removeprefix(base) for link in found if link.startswith(base)}
            return sorted(name for name in names if name and "/" not in name)
        places = [str(item["name"]) for item in self._list() if item.get("type") == "directory"]
        return sorted({place.rstrip("/").rpartition("/")[2] for place in places} - {""})

    def _list(self) -> Any:
        """Returns fsspec's entries directly below the URL; from a web server, the text of its page of links."""
        _filesystem(self._url).invalidate_cache()  # others publish
        deadline = time.monotonic() + SMALL_FILE_SECONDS

        def look() -> Any:
            if not self._is_http:
                return self._ask("ls", self._url, detail=True, deadline=deadline)
            page, _ = self._wait_for(_fetch(_filesystem(self._url), self._url, _LISTING_NBYTES), deadline)
            if len(page) > _LISTING_NBYTES:
                raise ValueError(
                    f"expected a page of links of at most {_LISTING_NBYTES:,} bytes, the server sent more: give the "
                    "URL of a folder with fewer entries, or of a set"
                )
            return page.decode("utf-8", "replace")

        return self._insist(look, self.name, "listing", deadline)

    def _size_of(self, name: str, deadline: float | None = None) -> int:
        """Returns the size of a file in bytes. Raises FileNotFoundError if the file does not exist."""
        url = join_place(self._url, name)
        by = time.monotonic() + SMALL_FILE_SECONDS if deadline is None else deadline

        def look() -> int:
            found = self._ask("info", url, deadline=by)
            if found.get("type") == "directory":
                raise FileNotFoundError(errno.ENOENT, "expected a file, found a folder")
            size = found.get("size")
            if type(size) is not int:
                raise ValueError("the server does not say how large the file is")
            return size

        return self._insist(look, join_place(self.name, name), "looking for the file", by)

    def _read_into(self, name: str, offset: int, buffer: memoryview, deadline: float | None = None) -> None:
        path, url = join_place(self.name, name), join_place(self._url, name)
        done = 0
        while done < len(buffer):
            start, nbytes = offset + done, min(len(buffer) - done, _REQUEST_NBYTES)
            what = f"reading {nbytes:,} bytes at byte {start}"
            data = self._insist(partial(self._read_some, name, url, start, nbytes, deadline), path, what, deadline)
            buffer[done : done + len(data)] = data
            done += len(data)

    def _read_some(self, name: str, url: str, start: int, nbytes: int, deadline: float | None) -> bytes | bytearray:
        """Returns at least one and at most `nbytes` bytes of a file, from byte `start` on."""
        data: bytes | bytearray
        if self._is_http:
            data, headers = self._wait_for(_fetch(_filesystem(self._url), url, nbytes, start), deadline)
            heard = headers.get("ETag", ""), headers.get("Content-Range", "").rpartition("/")[2]
            if self._heard.setdefault(name, heard)[0] != heard[0]:  # the server has another file there now
                self.changed.add(name)
            self._heard[name] = heard
        else:
            data = self._ask("cat_file", url, start=start, end=start + nbytes, deadline=deadline)
        if len(data) > nbytes:
            raise ValueError(
                f"expected {nbytes:,} bytes, the server sent more: it cannot send a part of a file: use another server"
            )
        if not data:
            if (size := self._size_of(name, deadline)) <= start:
                raise OSError(errno.EINVAL, f"the file ends at byte {size}")
            raise OSError(_SERVER_FAILED, "the server sent no bytes")
        return data

    def _ask(self, method: str, *arguments: object, deadline: float | None, **options: object) -> Any:
        """Calls `method` of fsspec's filesystem. `deadline`, of time.monotonic, holds for asynchronous filesystems."""
        filesystem = _filesystem(self._url)
        if not getattr(filesystem, "async_impl", False):
            return getattr(filesystem, method)(*arguments, **options)
        return self._wait_for(getattr(filesystem, f"_{method}")(*arguments, **options), deadline)

    def _wait_for(self, coroutine: Coroutine[Any, Any, T], deadline: float | None) -> T:
        """Returns a request's result. Raises TimeoutError at `deadline` (of time.monotonic), OSError after `close`."""
        request = asyncio.run_coroutine_threadsafe(coroutine, _filesystem(self._url).loop)
        try:
            while not wait([request], _LOOK_SECONDS).done:
                if self._closed:
                    raise OSError(errno.ECANCELED, "the storage was closed during the request")
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"no complete answer within {SMALL_FILE_SECONDS:g} seconds")
            return request.result()
        finally:
            request.cancel()  # or the end of the process would wait for it

    def _insist(self, call: Callable[[], T], path: str, what: str, deadline: float | None = None) -> T:
        """Returns the result of `call`. Retries transient failures for about a minute, or until `deadline`.

        If that does not help, raises an OSError about `path`, with the last failure and `what`, the request in words.
        """
        end = min(time.monotonic() + _PATIENCE_SECONDS, deadline or math.inf)
        longest, attempts = _FIRST_WAIT_SECONDS, 0
        while True:
            attempts += 1
            try:
                return call()
            except Exception as error:
                number, may_pass = _judge(error)
                pause = longest * _JITTER.uniform(0.5, 1.5)
                if not may_pass or self._closed or time.monotonic() + pause > end:
                    found = self._describe(error) + (_ACCESS_HINT if number == errno.EACCES else "")
                    break
            self._sleep(pause)
            longest = min(2 * longest, _LONGEST_WAIT_SECONDS)
        # Outside the `except` block: the first error, whose text may hold a password, must not become the context.
        raise OSError(number, f"{what} failed (attempts: {attempts}): {found}", path)

    def _sleep(self, seconds: float) -> None:
        """Sleeps for `seconds`, or until `close` is called."""
        end = time.monotonic() + seconds
        while not self._closed and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))

    def _describe(self, error: BaseException) -> str:
        error = _root(error)
        text = "".join(str(error).splitlines()[:1])
        parts = urlsplit(self._url)
        for secret in (parts.query, parts.netloc.rpartition("@")[0]):
            text = text.replace(secret, "...") if secret else text
        return f"{type(error).__name__}: {printable(without_credentials_in(text)[:300])}"


async def _fetch(filesystem: Any, url: str, most: int, start: int | None = None) -> tuple[bytearray, Any]:
    """Returns at most `most` bytes of a file on a web server, one byte more if the server sends more; and the headers.

    Requests the bytes from byte `start` on, or the whole file if `start` is None. fsspec's own calls would hold and
    unpack all that a server sends, even if that is far more.
    """
    options = dict(filesystem.kwargs)
    headers = {**options.pop("headers", {}), "Accept-Encoding": "identity"}
    if start is not None:
        headers["Range"] = f"bytes={start}-{start + most - 1}"
    session = await filesystem.set_session()
    async with session.get(filesystem.encode_url(url), headers=headers, **options) as answer:
        answer.raise_for_status()
        if answer.status != 206 and (start or answer.status != 200):
            raise ValueError(
                f"expected HTTP status 206, found {answer.status}: the server cannot send a part of a file: use another"
            )
        if (coding := answer.headers.get("Content-Encoding", "identity")) not in ("", "identity"):
            raise ValueError(f"expected the file as it is, the server sent it compressed ({coding!r:.40})")
        data = bytearray()
        async for piece in answer.content.iter_any():
            data += piece[: most + 1 - len(data)]
            if len(data) > most:
                break  # and the end of the block closes the connection
    return data, answer.headers


def _filesystem(url: str) -> Any:
    """Returns fsspec's filesystem for the URL. All threads of a process share a filesystem for each host."""
    parts = urlsplit(url)
    key = (os.getpid(), parts.scheme, parts.netloc)
    if key not in _filesystems:
        # Not fsspec's own instances: those may remember what others have listed. Of two made at once, one goes.
        _filesystems.setdefault(key, _new_filesystem(url))
    return _filesystems[key]


def _new_filesystem(url: str) -> Any:
    name = without_credentials(url)
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise SetNotFoundError(
            f'{name}: reading a URL needs fsspec, which is not installed. Install it: pip install "shardio[remote]"'
        ) from None
    try:
        filesystem = url_to_fs(url, skip_instance_cache=True)[0]
        if urlsplit(url).scheme in ("http", "https"):
            import aiohttp

            # Its own limit is of five minutes for a whole request: too long for silence, too short for slow lines.
            silence = aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE_SECONDS, sock_read=_SILENCE_SECONDS)
            ours = {"timeout": silence, "auto_decompress": False, "trust_env": True}  # HTTP_PROXY and the like
            filesystem.client_kwargs = ours | filesystem.client_kwargs
        return filesystem
    except ImportError as error:
        missing = next(
            (cause.name for cause in (error, error.__cause__) if isinstance(cause, ImportError) and cause.name), None
        )
        command = f"pip install {missing.partition('.')[0]}" if missing else str(error)
        raise SetNotFoundError(
            f"{name}: reading {urlsplit(url).scheme}:// needs a package that is not installed. Install it: {command}"
        ) from None


def _root(error: BaseException) -> BaseException:
    """Returns the error's first cause: fsspec's http calls every error "not found", and keeps the reason as cause."""
    while isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _status_of(error: BaseException) -> int | None:
    """Returns the HTTP status in an error of a filesystem's client, or in an OSError's cause; None if there is none."""
    for cause in (error, error.__cause__ if isinstance(error, OSError) else None):
        response = getattr(cause, "response", None)
        metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
        # One after the other: some warn of names that they keep for old callers.
        for name in ("status", "status_code", "code", "HTTPStatusCode"):
            value = metadata.get(name) or getattr(cause, name, None)
            if isinstance(value, int) and 400 <= value < 600:
                return value
    return None


def _judge(error: BaseException) -> tuple[int, bool]:
    """Returns (errno of the error, whether the error may be transient)."""
    error = _root(error)
    kind = type(error).__name__
    number = (error.errno if isinstance(error, OSError) else None) or 0
    if isinstance(error, TimeoutError) or "Timeout" in kind:
        return errno.ETIMEDOUT, True  # S3 has status 400 for it
    if "Redirect" in kind:  # aiohttp's errors: a loop, or a way to what is not http
        return _SERVER_FAILED, False
    if isinstance(error, PermissionError) or "Credential" in kind:
        return errno.EACCES, False
    if (status := _status_of(error)) is not None:
        return _ERRNO_OF_STATUS.get(status, _SERVER_FAILED), status >= 500 or status in _PASSING_STATUSES
    if isinstance(error, FileNotFoundError):
        return errno.ENOENT, False
    return (_SERVER_FAILED if number <= 0 or number == errno.EIO else number), not (
        isinstance(error, _FINAL_ERRORS) or number in _FINAL_ERRNOS
    )
