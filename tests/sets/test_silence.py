"""Servers that are silent or slow: a small request has one limit for all of it, a large one a limit of silence."""

from __future__ import annotations

import contextlib
import errno
import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from leaks import num_descriptors
from servers import SlowServer

from shardio.cli import output
from shardio.cli.main import cli
from shardio.format.manifest_file import load_manifest
from shardio.sets import catalogue, remote
from shardio.sets.storage import open_storage

pytest.importorskip("aiohttp", reason="aiohttp is not installed")


@pytest.fixture(scope="module", autouse=True)
def loop_of_fsspec() -> None:
    """Starts fsspec's thread, which stays with its descriptors for as long as the process."""
    from fsspec.asyn import get_loop

    get_loop()


@pytest.fixture
def out(make_set: Callable[..., Path]) -> Path:
    return make_set(3)


@pytest.fixture
def serve(out: Path) -> Iterator[Callable[..., str]]:
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
    with pytest.raises(TimeoutError, match=r"no complete answer within 0\.3 seconds: .*/manifest\.json'") as caught:
        place.load_manifest()
    assert caught.value.errno == errno.ETIMEDOUT


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


def test_a_listing_is_waited_for_within_one_limit(serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "SMALL_FILE_SECONDS", 0.3)
    (listing,) = catalogue.list_sets([serve("never")])
    assert "listing failed" in listing.problem
    assert "within 0.3 seconds" in listing.problem


def test_a_server_that_is_silent_for_one_set_is_not_asked_for_all_sets(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SMALL_FILE_SECONDS", 0.3)
    monkeypatch.setattr(catalogue, "_NUM_THREADS", 2)
    asked = []
    real = remote.RemoteStorage.load_manifest

    def load_manifest(self: remote.RemoteStorage) -> object:
        asked.append(self.name)
        return real(self)

    monkeypatch.setattr(remote.RemoteStorage, "list_folders", lambda self: [f"set-{i}" for i in range(50)])
    monkeypatch.setattr(remote.RemoteStorage, "load_manifest", load_manifest)
    (listing,) = catalogue.list_sets([serve("never")])
    assert [entry.state for entry in listing.sets] == ["unreadable"] * 50
    assert len(asked) <= 4
    assert sum("not read" in entry.reason for entry in listing.sets) == 50 - len(asked)


def test_a_shard_may_come_slowly_for_as_long_as_it_takes(
    serve: Callable[..., str], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SMALL_FILE_SECONDS", 0.2)
    monkeypatch.setattr(remote, "_PATIENCE_SECONDS", 0.0)
    place = open_storage(f"{serve(0.01, '.npy')}/{out.name}")
    entry = load_manifest(out).splits["train"].shards[0]
    start = time.monotonic()
    place.read_into(entry, 4096, memoryview(buffer := bytearray(60)))
    assert buffer == (out / entry.file).read_bytes()[4096:4156]
    assert time.monotonic() - start >= 0.6  # longer than each of the limits


def test_silence_in_the_middle_of_a_shard_ends_the_reading(
    serve: Callable[..., str], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(remote, "_PATIENCE_SECONDS", 0.1)
    place = open_storage(f"{serve(60.0, '.npy')}/{out.name}")
    entry = load_manifest(out).splits["train"].shards[0]
    with pytest.raises(TimeoutError, match=r"reading 50 bytes at byte 4096 failed .*train-00000\.npy"):
        place.read_into(entry, 4096, memoryview(bytearray(50)))


def test_close_ends_a_request_under_way(serve: Callable[..., str], out: Path) -> None:
    place = open_storage(f"{serve('never', '.npy')}/{out.name}")
    place.load_manifest()
    entry = load_manifest(out).splits["train"].shards[0]
    errors: list[BaseException] = []

    def read() -> None:
        try:
            place.read_into(entry, 4096, memoryview(bytearray(50)))
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    time.sleep(0.05)
    place.close()
    thread.join(20)
    assert not thread.is_alive()
    assert "closed during the request" in str(errors[0])


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


def test_it_is_told_that_a_server_lets_us_wait_and_for_how_long(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SMALL_FILE_SECONDS", 0.5)
    monkeypatch.setattr(output, "_TELL_SECONDS", 0.05)
    url = serve("never")
    for command in ("info", "list"):
        told = CliRunner().invoke(cli, [command, f"{url}/x"]).output
        line = f"shardio: still waiting for {url}/x: for each manifest and listing at most 0.5 seconds\n"
        assert told.startswith(line), told
