"""Storages, folders or URLs: ranges are read whole, passing errors are tried again, others are raised at once."""

from __future__ import annotations

import contextlib
import errno
import gc
import http.server
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from command import printed_by, run_forked
from deadlines import must_not_block
from folders import flip
from hooks import call_before
from leaks import num_descriptors
from plain_sets import first_shard, read_range
from servers import Fault, ObjectStore, SlowServer, cut, saying, short, slow, status, whole

from shardio.cli import output
from shardio.cli.main import cli
from shardio.errors import FormatError, SetNotFoundError
from shardio.format.manifest_file import load_manifest
from shardio.sets import catalogue, remote
from shardio.sets.storage import FileCopier, FolderStorage, open_storage


@pytest.fixture
def out(make_set: Callable[..., Path]) -> Path:
    return make_set(25)


@pytest.fixture(scope="module", autouse=True)
def begun_store(request: pytest.FixtureRequest) -> None:
    """Starts the object store, if it is installed, before the descriptors of a test are counted."""
    with contextlib.suppress(pytest.skip.Exception):
        request.getfixturevalue("running_store")


@pytest.fixture(params=["s3", "http"])
def url(request: pytest.FixtureRequest, out: Path) -> str:
    """The URL of a set in the store, by each protocol; or its folder."""
    if request.param == "folder":
        return str(out)
    store: ObjectStore = request.getfixturevalue("store")
    store.put_set(out, "small")
    store.requests.clear()
    return "s3://sets/small" if request.param == "s3" else f"{store.endpoint}/sets/small"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_FIRST_WAIT_SECONDS", 0.001)


# --- folders, object stores and web servers --------------------------------------------------------------------------

every_kind = pytest.mark.parametrize("url", ["folder", "s3", "http"], indirect=True)


@every_kind
def test_the_manifest_and_any_range_of_a_file_are_read(url: str, out: Path) -> None:
    entry, place = first_shard(out), open_storage(url)
    assert place.load_manifest() == load_manifest(out)
    data = (out / entry.file).read_bytes()
    for start, stop in ((0, len(data)), (1, 2), (4090, 4200), (len(data) - 1, len(data)), (5, 5)):
        assert read_range(place, entry, start, stop) == data[start:stop]
    assert (place.name, place.path_of(entry)) == (url, f"{url}/{entry.file}")


@every_kind
def test_what_is_not_there_is_named(url: str, out: Path) -> None:
    place = open_storage(f"{url}/nothing")
    with pytest.raises(SetNotFoundError, match=f"{re.escape(url)}/nothing"):
        place.load_manifest()
    with pytest.raises(FormatError, match=f"{re.escape(url)}/nothing/train-00000.npy: .*found nothing"):
        place.read_into(first_shard(out), 0, memoryview(bytearray(9)))


@every_kind
def test_a_file_of_another_size_is_refused(url: str, out: Path, request: pytest.FixtureRequest) -> None:
    entry, place = first_shard(out), open_storage(url)
    os.truncate(out / entry.file, entry.nbytes - 10)
    if url != str(out):
        request.getfixturevalue("store").put_set(out, "small")
    for start, stop in ((entry.nbytes - 20, entry.nbytes), (entry.nbytes - 5, entry.nbytes)):
        with pytest.raises(FormatError, match=f"expected {entry.nbytes} bytes, .* found {entry.nbytes - 10}"):
            read_range(place, entry, start, stop)


# --- folders ---------------------------------------------------------------------------------------------------------


def failing_reads(monkeypatch: pytest.MonkeyPatch, *outcomes: int) -> list[float]:
    """Makes the next reads fail with these errors, or give nothing for a 0. Returns the pauses between the attempts."""
    real, left, waits = os.preadv, list(outcomes), list[float]()

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        if left:
            if code := left.pop(0):
                raise OSError(code, os.strerror(code))
            return 0
        return real(descriptor, [buffers[0][:7]], offset)  # a network may give short answers

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


def test_a_relative_folder_stays_the_same_when_the_process_goes_elsewhere(
    out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(out.parent)
    place = open_storage(out.name)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert place.load_manifest() == load_manifest(out)
    assert place.name == out.name


def test_a_storage_reads_the_set_whose_manifest_it_gave(
    out: Path, make_set: Callable[..., Path], tmp_path: Path
) -> None:
    link, entry = tmp_path / "current", first_shard(out)
    link.symlink_to(out)
    place = open_storage(link)
    assert place.load_manifest() == load_manifest(out)
    link.unlink()
    link.symlink_to(make_set(25, (6, 5, 3), 9))
    assert read_range(place, entry, 0, entry.nbytes) == (out / entry.file).read_bytes()


def test_a_read_of_a_folder_that_may_pass_is_tried_again(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = first_shard(out)
    waits = failing_reads(monkeypatch, errno.EIO, 0, errno.ESTALE)
    assert read_range(FolderStorage(out), entry, 4096, 4146) == (out / entry.file).read_bytes()[4096:4146]
    assert waits == sorted(waits)
    assert len(waits) == 3


@pytest.mark.parametrize(("code", "attempts"), [(errno.EIO, 4), (errno.EACCES, 1)])
def test_what_does_not_pass_names_file_and_offset(
    out: Path, monkeypatch: pytest.MonkeyPatch, code: int, attempts: int
) -> None:
    entry = first_shard(out)
    failing_reads(monkeypatch, *[code] * 9)
    with pytest.raises(OSError, match=rf"reading 50 bytes at byte 4096 failed \(attempts: {attempts}\)") as caught:
        FolderStorage(out).read_into(entry, 4096, memoryview(bytearray(50)))
    assert caught.value.errno == code
    assert caught.value.filename == str(out / entry.file)


# --- object stores and web servers -----------------------------------------------------------------------------------


def test_a_long_range_is_asked_for_in_parts(
    url: str, out: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_REQUEST_NBYTES", 100)
    entry = first_shard(out)
    assert read_range(open_storage(url), entry, 4000, 4250) == (out / entry.file).read_bytes()[4000:4250]
    asked = [found for method, path, found in store.requests if method == "GET" and path.endswith(entry.file)]
    assert asked == ["bytes=4000-4099", "bytes=4100-4199", "bytes=4200-4249"]


def test_what_may_pass_is_tried_again(url: str, out: Path, store: ObjectStore) -> None:
    faults: list[Fault] = [short(7), short(0), cut(7), cut(0), status(500), status(503, "ServiceUnavailable")]
    faults += [status(502), status(503, "SlowDown"), status(429, "TooManyRequests"), slow(0.1)]
    entry, place = first_shard(out), open_storage(url)
    place.load_manifest()
    store.faults.extend(faults)
    assert read_range(place, entry, 4096, 4146) == (out / entry.file).read_bytes()[4096:4146]
    store.faults.extend(faults)
    assert place.load_manifest() == load_manifest(out)
    assert not store.faults


def test_a_server_that_stays_away_is_an_error_with_url_range_and_cause(
    url: str, out: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_PATIENCE_SECONDS", 0.2)
    entry, place = first_shard(out), open_storage(url)
    place.read_into(entry, 0, memoryview(bytearray(1)))
    store.always = status(500)
    with pytest.raises(OSError, match=r"reading 50 bytes at byte 4096 failed .*(500|Internal)") as caught:
        place.read_into(entry, 4096, memoryview(bytearray(50)))
    assert caught.value.filename == f"{url}/{entry.file}"
    assert caught.value.errno == errno.EHOSTUNREACH
    with pytest.raises(OSError, match=r"looking for the file failed \(attempts: \d+\)") as caught:
        place.load_manifest()
    assert not isinstance(caught.value, FileNotFoundError)


def test_a_read_that_waits_to_try_again_gives_up_when_the_storage_is_closed(store: ObjectStore) -> None:
    place = remote.RemoteStorage("memory://waits")

    def fail() -> None:
        threading.Timer(0.1, place.close).start()
        raise OSError(errno.EIO, "may pass")

    start = time.monotonic()
    with pytest.raises(OSError, match="may pass"):
        place._insist(fail, "path", "trying")
    assert time.monotonic() - start < 30


def test_the_waits_grow_and_differ(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(remote, "_FIRST_WAIT_SECONDS", 0.1)
    place = remote.RemoteStorage("memory://waits")
    monkeypatch.setattr(place, "_sleep", waits.append)

    def call() -> str:
        if len(waits) < 8:
            raise OSError(errno.EIO, "may pass")
        return "done"

    assert place._insist(call, "path", "trying") == "done"
    assert waits[0] < waits[2] < waits[4] < waits[6]
    assert max(waits) <= 12
    assert len({round(wait / 2**number, 6) for number, wait in enumerate(waits)}) == 8


class ClientError(Exception):
    """An error of some filesystem's client, with what it keeps beside the text."""

    def __init__(self, **facts: object) -> None:
        super().__init__("of a client")
        vars(self).update(facts)


class NoCredentialsError(Exception): ...


class ReadTimeoutError(Exception): ...


def of_s3(status: int) -> ClientError:
    return ClientError(response={"ResponseMetadata": {"HTTPStatusCode": status}})


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "number", "may_pass"),
    [
        (ClientError(), errno.EHOSTUNREACH, True),
        (ClientError(status=503), errno.EHOSTUNREACH, True),
        (ClientError(status_code=429), errno.EHOSTUNREACH, True),
        (ClientError(status_code=404), errno.ENOENT, False),
        (ClientError(code=403), errno.EACCES, False),
        (ClientError(code=400), errno.EHOSTUNREACH, False),
        (ClientError(status=416), errno.EINVAL, False),
        (of_s3(401), errno.EACCES, False),
        (of_s3(500), errno.EHOSTUNREACH, True),
        (caused_by(OSError(errno.EIO, "unknown code"), of_s3(403)), errno.EACCES, False),
        (caused_by(TimeoutError("RequestTimeout"), of_s3(400)), errno.ETIMEDOUT, True),
        (caused_by(PermissionError("ExpiredToken"), of_s3(400)), errno.EACCES, False),
        # The body of an answer was cut: aiohttp calls that a bad request, within.
        (caused_by(ClientError(), ClientError(status=400)), errno.EHOSTUNREACH, True),
        # fsspec's http raises it when it looks for a file.
        (caused_by(FileNotFoundError("url"), ClientError(status=503)), errno.EHOSTUNREACH, True),
        (caused_by(FileNotFoundError("url"), ConnectionResetError(errno.ECONNRESET, "")), errno.ECONNRESET, True),
        (caused_by(FileNotFoundError("url"), ClientError(status=404)), errno.ENOENT, False),
        (FileNotFoundError("url"), errno.ENOENT, False),
        (NoCredentialsError(), errno.EACCES, False),
        (ReadTimeoutError(), errno.ETIMEDOUT, True),
        (OSError(errno.EINVAL, ""), errno.EINVAL, False),
        (OSError(-2, "Name or service not known"), errno.EHOSTUNREACH, True),
        (ValueError("no such bucket name"), errno.EHOSTUNREACH, False),
        (TypeError("a mistake"), errno.EHOSTUNREACH, False),
    ],
    ids=repr,
)
def test_errors_of_any_client_are_told_apart(error: Exception, number: int, may_pass: bool) -> None:
    assert remote._judge(error) == (number, may_pass)


def test_what_may_not_be_read_is_an_error_at_once(url: str, out: Path, store: ObjectStore) -> None:
    entry, place = first_shard(out), open_storage(url)
    place.read_into(entry, 0, memoryview(bytearray(1)))
    store.always = status(403, "AccessDenied")
    with pytest.raises(PermissionError, match=r"at byte 4096 failed \(attempts: 1\): .* Are credentials set"):
        place.read_into(entry, 4096, memoryview(bytearray(50)))
    with pytest.raises(PermissionError, match=r"looking for the file failed \(attempts: 1\)"):
        place.load_manifest()


def test_a_web_server_that_has_another_file_or_another_length_is_heard(store: ObjectStore, out: Path) -> None:
    store.put_set(out, "small")
    entry, place = first_shard(out), open_storage(f"{store.endpoint}/sets/small")
    for tag, nbytes, changed in (("a", entry.nbytes, set()), ("b", entry.nbytes, {entry.file}), ("b", 99999, None)):
        store.always = saying(Etag=tag, Content_Range=f"bytes 0-8/{nbytes}")
        place.changed.clear()
        with pytest.raises(FormatError, match="found 99999 bytes") if changed is None else contextlib.nullcontext():
            place.read_into(entry, 0, memoryview(bytearray(9)))
        assert place.changed == (changed or set())


def test_the_manifest_has_the_size_cap_and_the_checks_of_a_folder(
    url: str, out: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("sets/small/manifest.json", b"{}")
    with pytest.raises(FormatError, match=f"{re.escape(url)}/manifest.json: format: expected 'shardio'"):
        open_storage(url).load_manifest()
    monkeypatch.setattr("shardio.format.manifest_file.MAX_MANIFEST_NBYTES", 1)
    store.requests.clear()
    with pytest.raises(FormatError, match=r"manifest\.json: expected a manifest of at most 1 bytes, found 2"):
        open_storage(url).load_manifest()
    assert [method for method, _, _ in store.requests] == ["HEAD"]


def test_a_web_server_without_ranges_is_refused_before_a_shard_comes(store: ObjectStore, out: Path) -> None:
    store.put_set(out, "small")
    store.always = whole
    place, entry = open_storage(f"{store.endpoint}/sets/small"), first_shard(out)
    assert place.load_manifest() == load_manifest(out)
    for start in (0, 4096):
        with pytest.raises(OSError, match=r"attempts: 1\).*part of a file"):
            place.read_into(entry, start, memoryview(bytearray(50)))


Handler = http.server.BaseHTTPRequestHandler
_HUGE_NBYTES = 64 << 20


def reply(handler: Handler, code: int, headers: dict[str, str], data: bytes = b"") -> None:
    handler.send_response(code)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(data)


def pouring(headers: dict[str, str]) -> tuple[list[int], Callable[[Handler], None]]:
    """Returns an answer that sends more than any request asks for, and the list in which it counts the bytes."""
    sent = [0]

    def answer(handler: Handler) -> None:
        reply(handler, 206 if "Range" in handler.headers else 200, headers)
        piece = b"\x1f\x8b" + bytes(65534)
        piece = b"%x\r\n%b\r\n" % (len(piece), piece) if "Transfer-Encoding" in headers else piece
        handler.close_connection = True
        with contextlib.suppress(OSError):
            while sent[0] < _HUGE_NBYTES:
                handler.wfile.write(piece)
                sent[0] += len(piece)

    return sent, answer


@pytest.mark.parametrize(
    "headers",
    [
        {"Transfer-Encoding": "chunked"},
        {"Content-Length": str(1 << 40)},
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "deflate", "Transfer-Encoding": "chunked"},
    ],
    ids=repr,
)
@pytest.mark.parametrize("file", ["manifest.json", "links"])
def test_a_web_server_that_sends_more_than_was_asked_for_is_hung_up_on(
    store: ObjectStore, out: Path, headers: dict[str, str], file: str
) -> None:
    sent, answer = pouring(headers)
    with contextlib.closing(SlowServer(out.parent, lambda path: answer if path.endswith(file) else "now")) as server:
        place = open_storage(f"{server.url}/{out.name}")
        call = place.load_manifest if file == "manifest.json" else open_storage(f"{server.url}/links").list_folders
        with pytest.raises(OSError, match=r"attempts: 1\).*(sent more|part of a file|compressed)"):
            call()
    assert sent[0] < _HUGE_NBYTES / 2


def test_no_server_is_asked_to_compress(store: ObjectStore, out: Path) -> None:
    asked: list[str | None] = []

    def answer(handler: Handler) -> None:
        asked.append(handler.headers["Accept-Encoding"])
        handler.send_error(404)

    with contextlib.closing(SlowServer(out.parent, lambda path: answer)) as server:
        place = open_storage(f"{server.url}/{out.name}")
        for call in (place.load_manifest, place.list_folders):
            with pytest.raises(FileNotFoundError):
                call()
    assert asked == ["identity", "identity"]


@pytest.mark.parametrize("place", ["{url}/loop", "file:///etc/passwd", "ftp://host/file", "http://"])
def test_a_redirect_that_leads_nowhere_is_an_error_at_once(store: ObjectStore, out: Path, place: str) -> None:
    def answer(handler: Handler) -> None:
        reply(handler, 302, {"Location": place.format(url=server.url), "Content-Length": "0"})

    with contextlib.closing(SlowServer(out.parent, lambda path: answer)) as server:
        storage = open_storage(f"{server.url}/{out.name}")
        with pytest.raises(OSError, match=r"attempts: 1\)"):
            storage.read_into(first_shard(out), 4096, memoryview(bytearray(50)))


def test_a_page_of_links_names_the_folders_directly_below(store: ObjectStore, tmp_path: Path) -> None:
    links = ["a/", "/sets/b/", "{url}/sets/c/", "d", "e/f/", "../", "/sets/", "http://elsewhere/sets/g/", "?C=N;O=D"]

    def answer(handler: Handler) -> None:
        page = "".join(f'<li><A class=x HREF="{link.format(url=server.url)}">x</A>' for link in links).encode()
        reply(handler, 200, {"Content-Length": str(len(page))}, page)

    with contextlib.closing(SlowServer(tmp_path, lambda path: answer)) as server:
        for url in (f"{server.url}/sets", f"{server.url}/sets/?signature=1"):
            assert open_storage(url).list_folders() == ["a", "b", "c"]


def test_a_damaged_set_is_named_and_nothing_advised_that_takes_no_url(
    url: str, out: Path, store: ObjectStore, tmp_path: Path
) -> None:
    flip(out / first_shard(out).file)
    store.put_set(out, "small")
    with pytest.raises(FormatError, match=f"{url}/{first_shard(out).file}: sha256") as caught:
        FileCopier(open_storage(url), 1, "shardio-test").copy(tmp_path, [first_shard(out)])
    assert not re.search("verify [a-z0-9]+:", str(caught.value))


def test_a_set_on_a_hub_is_staged(out: Path, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")

    def answer(handler: Handler) -> None:
        path = handler.path.partition("?")[0]
        if name := re.fullmatch(r"/datasets/user/photos/resolve/main/([\w.-]+)", path):
            data = (out / name[1]).read_bytes()
        else:
            files = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0"} for file in out.iterdir()
            ]
            data = json.dumps(files if "/tree/main" in path else {"id": "user/photos", "sha": "0" * 40}).encode()
        if wanted := handler.headers.get("Range"):
            first, last = map(int, wanted.removeprefix("bytes=").split("-"))
            data = data[first : last + 1]
        reply(handler, 206 if wanted else 200, {"Content-Length": str(len(data))}, data)

    with contextlib.closing(SlowServer(tmp_path, lambda path: answer)) as hub:
        env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        result = run_forked("shardio", "stage", "hf://datasets/user/photos", tmp_path / "cache", env=env)
    assert result.returncode == 0, result.stderr
    assert load_manifest(Path(result.stdout.strip())).digest == load_manifest(out).digest


def test_many_threads_read_at_the_same_time(url: str, out: Path, store: ObjectStore) -> None:
    entry, place = first_shard(out), open_storage(url)
    data = (out / entry.file).read_bytes()
    store.faults.extend([status(500), cut(3), short(5)] * 5)

    starts = range(0, 4900, 100)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda start: read_range(place, entry, start, start + 97), starts))
    assert found == [data[start : start + 97] for start in starts]


FORKED = """
import os, sys
from shardio.sets.storage import open_storage
place = open_storage(sys.argv[1])
digest = place.load_manifest().digest  # connections are open
child = os.fork()
if not child:
    entry = place.load_manifest().splits["train"].shards[0]
    buffer = bytearray(60)
    place.read_into(entry, 4096, memoryview(buffer))
    os._exit(0 if bytes(buffer) == open(sys.argv[2], "rb").read()[4096:4156] else 1)
assert os.waitpid(child, 0)[1] == 0
assert place.load_manifest().digest == digest
"""


def test_a_forked_process_reads_by_connections_of_its_own(url: str, out: Path) -> None:
    command = [sys.executable, "-c", FORKED, url, str(out / "train-00000.npy")]
    subprocess.run(command, check=True, timeout=60)


def test_a_storage_that_was_sent_to_another_process_reads_the_same(store: ObjectStore, out: Path) -> None:
    store.put_set(out, "small")
    for place in (open_storage("s3://sets/small?versions=1"), open_storage("s3://sets/small")):
        sent = pickle.loads(pickle.dumps(place))
        assert (type(sent), vars(sent)) == (type(place), vars(place))
    assert sent.load_manifest() == load_manifest(out)


@pytest.mark.parametrize("code", [403, 404, 500])
def test_no_password_and_no_signature_is_shown(
    store: ObjectStore, out: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(remote, "_PATIENCE_SECONDS", 0.05)
    host = store.endpoint.removeprefix("http://")
    place = open_storage(f"http://user:pass%20word@{host}/sets/small?X-Signature=abc%2Fdef&b=1")
    store.always = status(code)
    calls: list[Callable[[], object]] = [
        place.load_manifest,
        lambda: place.read_into(first_shard(out), 0, memoryview(bytearray(3))),
    ]
    for call in calls:
        with pytest.raises((OSError, FormatError)) as caught:
            call()
        error: BaseException | None = caught.value
        while error is not None:
            assert not re.search("user|pass|word|Signature|abc|def", repr(error).replace("FormatError", ""))
            assert f"http://{host}/sets/small" in str(error) or error is not caught.value
            error = error.__cause__ or error.__context__
    assert place.name == f"http://{host}/sets/small"


def test_a_signature_is_sent_with_every_file(store: ObjectStore, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Recorder:
        def info(self, url: str) -> dict[str, object]:
            asked.append(url)
            return {"size": first_shard(out).nbytes, "type": "file"}

    monkeypatch.setattr(remote, "_filesystem", lambda url: Recorder())
    assert remote.RemoteStorage("https://user:secret@host/a/b/?sig=1")._size_of("manifest.json")
    assert asked == ["https://user:secret@host/a/b/manifest.json?sig=1"]


@pytest.mark.parametrize(
    ("missing", "command_expected"), [("fsspec", 'pip install "shardio[remote]"'), ("s3fs", "pip install s3fs")]
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, missing: str, command_expected: str
) -> None:
    script = """
import sys
sys.modules[sys.argv[1]] = None
from shardio.errors import SetNotFoundError
from shardio.sets.storage import open_storage
open_storage(sys.argv[2])
try:
    open_storage("s3://user:secret@bucket/set")
except SetNotFoundError as error:
    print(error)
"""
    if missing == "s3fs":
        pytest.importorskip("fsspec")
    found = printed_by("-c", script, missing, tmp_path)
    assert found.startswith("s3://bucket/set: reading")
    assert f"Install it: {command_expected}\n" in found


def test_opening_a_folder_imports_no_filesystems(out: Path) -> None:
    script = "import sys; from shardio.sets.storage import open_storage; open_storage(sys.argv[1]).load_manifest()\n"
    script += "print({'fsspec', 's3fs', 'aiohttp'} & sys.modules.keys())"
    assert printed_by("-c", script, out) == "set()\n"


# --- servers that are silent or slow ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loop_of_fsspec() -> None:
    """Starts fsspec's thread, which stays with its descriptors for as long as the process."""
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    from fsspec.asyn import get_loop

    get_loop()


@pytest.fixture
def serve(out: Path, loop_of_fsspec: None) -> Iterator[Callable[..., str]]:
    """serve("never"), serve(seconds per byte): the URL of a root in which the set lies; only what ends so is slow."""
    before = num_descriptors()
    servers = []

    def start(speed: str | float, slow: str = "") -> str:
        servers.append(SlowServer(out.parent, lambda path: speed if path.endswith(slow) else "now"))
        return servers[-1].url

    yield start
    for server in servers:
        server.close()
    remote._filesystems.clear()
    gc.collect()  # closes the connections, in fsspec's thread
    deadline = time.monotonic() + 10
    while num_descriptors() > before and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize("speed", ["never", 0.05])
def test_a_manifest_is_waited_for_within_one_limit(
    serve: Callable[..., str], out: Path, monkeypatch: pytest.MonkeyPatch, speed: str | float
) -> None:
    monkeypatch.setattr(remote, "SMALL_FILE_SECONDS", 0.3)
    place = open_storage(f"{serve(speed)}/{out.name}")
    with pytest.raises(TimeoutError, match=r"within 0\.3 seconds: .*/manifest\.json'"):
        place.load_manifest()


def test_a_web_server_is_read_through_the_proxy_of_the_environment_unless_no_proxy_names_it(
    serve: Callable[..., str], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_PATIENCE_SECONDS", 0.2)
    manifest, server = load_manifest(out), serve("now")
    out.rename(out.parent / "moved")
    (out.parent / "http:/sets.invalid").mkdir(parents=True)  # a proxy is asked for the whole URL
    (out.parent / "moved").rename(out.parent / "http:/sets.invalid/a")
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, server)
    assert open_storage("http://sets.invalid/a").load_manifest() == manifest
    monkeypatch.setenv("NO_PROXY", "localhost,.invalid")
    with pytest.raises(OSError, match=r"sets\.invalid:80"):
        open_storage("http://sets.invalid/a").load_manifest()


def test_a_server_that_is_silent_for_one_set_is_not_asked_for_all_sets(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SMALL_FILE_SECONDS", 0.3)
    monkeypatch.setattr(catalogue, "_NUM_THREADS", 2)
    asked: list[str] = []
    monkeypatch.setattr(remote.RemoteStorage, "list_folders", lambda self: [f"set-{i}" for i in range(50)])
    call_before(monkeypatch, remote.RemoteStorage, "load_manifest", lambda storage: asked.append(storage.name))
    (listing,) = catalogue.list_sets([serve("never")])
    assert [entry.state for entry in listing.sets] == ["unreadable"] * 50
    assert len(asked) <= 4
    assert sum("not read" in entry.reason for entry in listing.sets) == 50 - len(asked)


def test_a_shard_may_come_slowly_for_as_long_as_it_takes(
    serve: Callable[..., str], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SMALL_FILE_SECONDS", 0.2)
    monkeypatch.setattr(remote, "_PATIENCE_SECONDS", 0.0)
    place, entry, start = open_storage(f"{serve(0.01, '.npy')}/{out.name}"), first_shard(out), time.monotonic()
    assert read_range(place, entry, 4096, 4156) == (out / entry.file).read_bytes()[4096:4156]
    assert time.monotonic() - start >= 0.6  # longer than each of the limits


def test_silence_in_the_middle_of_a_shard_ends_the_reading(
    serve: Callable[..., str], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(remote, "_PATIENCE_SECONDS", 0.1)
    place = open_storage(f"{serve(60.0, '.npy')}/{out.name}")
    with pytest.raises(TimeoutError, match=r"reading 50 bytes at byte 4096 failed .*train-00000\.npy"):
        place.read_into(first_shard(out), 4096, memoryview(bytearray(50)))


def test_close_ends_a_request_under_way(serve: Callable[..., str], out: Path) -> None:
    place = open_storage(f"{serve('never', '.npy')}/{out.name}")
    place.load_manifest()
    threading.Timer(0.05, place.close).start()
    with must_not_block(), pytest.raises(OSError, match="closed during the request"):
        place.read_into(first_shard(out), 4096, memoryview(bytearray(50)))


@pytest.mark.usefixtures("loop_of_fsspec")
@pytest.mark.parametrize("command", ["info", "list", "stage"])
def test_ctrl_c_ends_a_command_that_waits_for_a_server(tmp_path: Path, command: str) -> None:
    asked = threading.Event()

    def answer(path: str) -> str:
        asked.set()
        return "never"

    with contextlib.closing(SlowServer(tmp_path, answer)) as server:
        words = [command, f"{server.url}/", *([str(tmp_path / "cache")] if command == "stage" else [])]
        start = [sys.executable, "-m", "shardio", *words]
        with subprocess.Popen(start, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert asked.wait(60)
                process.send_signal(signal.SIGINT)
                error = process.communicate(timeout=30)[1]
            finally:
                process.kill()
    assert process.returncode == 130
    assert error.endswith("shardio: interrupted\n")


def test_a_manifest_or_listing_that_does_not_come_is_an_error_and_the_wait_for_it_is_told(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SMALL_FILE_SECONDS", 0.5)
    monkeypatch.setattr(output, "_TELL_SECONDS", 0.05)
    url = serve("never")
    for command, what in (("info", "looking for the file"), ("list", "listing")):
        result = CliRunner().invoke(cli, [command, f"{url}/x"])
        line = f"shardio: still waiting for {url}/x: for each manifest and listing at most 0.5 seconds\n"
        assert result.output.startswith(line)
        assert re.search(f"{what} failed .*within 0.5 seconds", result.output + str(result.exception))
