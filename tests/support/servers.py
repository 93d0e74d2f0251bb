"""An object store of S3's protocol on this machine, whose answers go wrong when a test asks for it.

Its objects can be read by plain HTTP, too.
"""

from __future__ import annotations

import contextlib
import gc
import http.server
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from garbage import freeze_imported

from shardio.sets import remote

Fault = Callable[[Any, dict[str, Any], Any], Iterable[bytes]]


def status(code: int, name: str = "InternalError") -> Fault:
    """An error of S3 in place of the answer."""

    def fault(app: Any, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        body = f"<Error><Code>{name}</Code><Message>{name} on purpose</Message></Error>".encode()
        start_response(f"{code} Wrong", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    return fault


def _altered(alter: Callable[[dict[str, str], bytes], tuple[dict[str, str], bytes]]) -> Fault:
    def fault(app: Any, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        said: list[Any] = []
        body = b"".join(app(environ, lambda line, headers, *_: said.extend((line, headers))))
        headers, body = alter(dict(said[1]), body)
        start_response(said[0], list(headers.items()))
        return [body]

    return fault


def short(nbytes: int) -> Fault:
    """So many bytes of the body, and a length that agrees."""
    return _altered(lambda headers, body: ({**headers, "Content-Length": str(len(body[:nbytes]))}, body[:nbytes]))


def cut(nbytes: int) -> Fault:
    """So many bytes of the body; then the connection is closed."""
    return _altered(lambda headers, body: (headers, body[:nbytes]))


def saying(**changed: str) -> Fault:
    """The same body with other headers."""

    def alter(headers: dict[str, str], body: bytes) -> tuple[dict[str, str], bytes]:
        others = {name: value for name, value in headers.items() if name.title().replace("-", "_") not in changed}
        return others | {name.replace("_", "-"): value for name, value in changed.items()}, body

    return _altered(alter)


def slow(seconds: float) -> Fault:
    def fault(app: Any, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        time.sleep(seconds)
        answer: Iterable[bytes] = app(environ, start_response)
        return answer

    return fault


def whole(app: Any, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    """Gives the whole object, whatever range was asked for."""
    answer: Iterable[bytes] = app(
        {name: value for name, value in environ.items() if name != "HTTP_RANGE"}, start_response
    )
    return answer


class ObjectStore:
    """`faults` are used up by reads, one each; `always` is the fault of all requests that are left."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.faults: deque[Fault] = deque()
        self.always: Fault | None = None
        self.requests: list[tuple[str, str, str]] = []
        self.endpoint = ""

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path, environ.get("HTTP_RANGE", "")))
        fault = self.always
        if method == "GET" and self.faults:
            fault = self.faults.popleft()
        answer: Iterable[bytes] = (fault or slow(0))(self._app, environ, start_response)
        return answer

    def put(self, path: str, data: bytes = b"") -> None:
        headers = {"Content-Type": "application/octet-stream", "x-amz-acl": "public-read"}
        request = urllib.request.Request(f"{self.endpoint}/{path}", data=data, method="PUT", headers=headers)
        with urllib.request.urlopen(request, timeout=30):
            pass

    def put_set(self, out: Path, prefix: str) -> None:
        """Copies a set's files into the bucket "sets", below the prefix."""
        for path in out.iterdir():
            self.put(f"sets/{prefix}/{path.name}", path.read_bytes())


class SlowServer:
    """A web server on this machine that gives the files of a folder as `answer` says of each path: "now", "never", or
    how many seconds pass before each byte; or by a function of the request's handler. HEAD is answered at once but for
    "never"."""

    def __init__(self, folder: Path, answer: Callable[[str], str | float | Callable[[Any], None]]) -> None:
        self._ended = ended = threading.Event()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer()

            def do_GET(self) -> None:
                self._answer()

            def _answer(self) -> None:
                speed = answer(self.path)
                if speed == "never":
                    ended.wait()
                    return
                if callable(speed) and self.command == "GET":
                    speed(self)
                    return
                path = folder / self.path.lstrip("/")
                found = path.read_bytes() if path.is_file() else b""
                wanted = self.headers.get("Range")
                if wanted is not None:
                    first, last = map(int, wanted.removeprefix("bytes=").split("-"))
                    found = found[first : last + 1]
                self.send_response(404 if not path.exists() else 200 if wanted is None else 206)
                self.send_header("Content-Length", str(len(found)))
                self.send_header("Accept-Ranges", "bytes")
                self.end_headers()
                if self.command == "HEAD":
                    return
                for byte in (bytes([b]) for b in found) if isinstance(speed, float) else [found]:
                    if isinstance(speed, float) and ended.wait(speed):
                        return
                    with contextlib.suppress(OSError):
                        self.wfile.write(byte)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False  # so that they are joined
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="slow-server")
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="module")
def running_store() -> Iterator[ObjectStore]:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    pytest.importorskip("flask", reason="moto's server is not installed")
    moto = pytest.importorskip("moto.moto_server.werkzeug_app", reason="moto is not installed")
    from fsspec.asyn import get_loop
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *_: Any, **__: Any) -> None:
            pass

    freeze_imported()
    get_loop()  # its thread and descriptors stay for as long as the process
    store = ObjectStore(moto.DomainDispatcherApplication(moto.create_backend_app))
    server = make_server("127.0.0.1", 0, store, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, name="object-store")
    thread.start()
    store.endpoint = f"http://127.0.0.1:{server.server_port}"
    store.put("sets")
    yield store
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def store(running_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """The store, to which s3:// leads, without faults and without what other tests asked."""
    for name, value in {
        "AWS_ENDPOINT_URL": running_store.endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",  # the client's own attempts take seconds
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    running_store.faults.clear()
    running_store.requests.clear()
    running_store.always = None
    yield running_store
    remote._filesystems.clear()
    gc.collect()  # closes the connections: fsspec's filesystems refer to themselves
