"""Conversions of the fixture `image_tree`, with their options, and disturbances of them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, get_args

import pytest
from folders import hashes

from shardio.conversion.convert import convert
from shardio.conversion.engine import Engine, Pool, run_on_pool
from shardio.conversion.images.decode import DecodedImage, decode_image
from shardio.conversion.options import FitMode, Progress, Resample
from shardio.conversion.plan import ShardTask
from shardio.conversion.records import Reject, ShardRecord, read_rejects
from shardio.conversion.sources import collection as sources
from shardio.conversion.task import Report
from shardio.errors import DecodeError
from shardio.format.manifest_file import load_manifest

SIZE = 16
PER_SHARD = 3
OPTIONS: dict[str, Any] = {"size": SIZE, "shard_size": 4096 + PER_SHARD * SIZE * SIZE * 3, "workers": 1}
"""For `image_tree`: four shards of three samples in train, two in val."""


# A conversion on so many threads has two processes.
TWO_PROCESSES = 5


def run_on(executor: Executor, patch: pytest.MonkeyPatch, threads: int = 1) -> None:
    """Has the tasks of conversions done by this executor, as by worker processes or machines of a cluster."""

    def run(engine: Engine, tasks: Sequence[ShardTask], report: Report, run_file: Path) -> list[ShardRecord]:
        return run_on_pool(tasks, Pool(executor), report, run_file, threads) if tasks else []

    patch.setattr(Engine, "run", run)


def rejects_of(out: Path) -> list[Reject]:
    return read_rejects(out, load_manifest(out).rejects)


_undisturbed: dict[str, dict[str, str]] = {}


def undisturbed(src: Path, folder: Path, **options: Any) -> dict[str, str]:
    """Returns the hashes of an undisturbed conversion of the fixture `image_tree`, which it makes in `folder`.

    It converts once for the same options, as all trees of the fixture are the same.
    """
    name = repr(sorted(options.items()))
    if name not in _undisturbed:
        convert(src, folder, **options)
        _undisturbed[name] = hashes(folder)
    return _undisturbed[name]


def convert_twice_at_once(src: Path, out: Path) -> list[BaseException]:
    """Does one conversion in two threads that begin at the same moment. Returns what they raise."""
    barrier = threading.Barrier(2)
    errors: list[BaseException] = []

    def work() -> None:
        barrier.wait(30)
        try:
            convert(src, out, **OPTIONS)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return errors


class Interrupt:
    """A progress callback that raises once `after` sources are done."""

    def __init__(self, after: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.after = after
        self.error = error

    def __call__(self, progress: Progress) -> None:
        if progress.done >= self.after:
            raise self.error


def interrupted(src: Path, out: Path, after: int, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        convert(src, out, on_progress=Interrupt(after), **{**OPTIONS, **options})
    assert not (out / "manifest.json").exists()


def rejects(out: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (out / "rejects.jsonl").read_text("ascii").splitlines()]


@contextlib.contextmanager
def failing_storage(key: str) -> Iterator[None]:
    """Makes the file of this source unreadable inside of the block."""
    real = sources.FileOrigin.read

    def read(origin: sources.FileOrigin, source: sources.Source) -> bytes:
        if source.key == key.encode():
            raise DecodeError("unreadable", os.strerror(errno.EIO))
        return real(origin, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources.FileOrigin, "read", read)
        yield


def decode_or_refuse(data: bytes) -> DecodedImage | DecodeError:
    try:
        return decode_image(data)
    except DecodeError as error:
        return error


RESAMPLES: tuple[Resample, ...] = get_args(Resample)
MODES: tuple[FitMode, ...] = ("crop", "squash", "pad")
"""The fits that take any size and filter."""
