"""The loader with each way of reading: the same batches, errors that name files, and nothing left over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deadlines import until
from leaks import num_descriptors
from numpy.typing import NDArray
from pictures import sample_pixels

import shardio.kernels.rowread
import shardio.reading.choose
import shardio.reading.file_reader
from shardio.loading.loader import ShardLoader
from shardio.reading.choose import Io
from shardio.reading.reader import MappedReader, Request
from shardio.system.machine import usable_cores
from shardio.system.pour import direct_alignment

NUM_SAMPLES = 47
SHAPE = (6, 5, 3)
# What the loader will take for batches of five: those that are ready, the one being filled, and the consumer's.
RESERVED = (2 + 2) * 5 * 90
DEADLINE_SECONDS = 10
IOS: list[Io] = ["auto", "mmap", "pread", "direct"]
MakeLoader = Callable[..., ShardLoader]
Events = list[tuple[str, tuple[int, ...]]]


@pytest.fixture
def loader_of(make_set: Callable[..., Path]) -> MakeLoader:
    """loader_of(io, ...): a loader on the CPU of 47 samples in five shards."""

    def make(io: Io, batch_size: int = 5, **options: Any) -> ShardLoader:
        path = make_set(NUM_SAMPLES, SHAPE)
        if io == "direct" and direct_alignment(path / "train-00000.npy") is None:
            pytest.skip("O_DIRECT does not work here")
        return ShardLoader(path, batch_size, io=io, device="cpu", return_indices=True, **options)

    return make


def check(batch: tuple[torch.Tensor, ...]) -> list[int]:
    images, labels, indices = batch
    for image, label, index in zip(images, labels.tolist(), indices.tolist(), strict=True):
        assert np.array_equal(image.permute(1, 2, 0).numpy(), sample_pixels(index, SHAPE))
        assert label == index % 7
    numbers: list[int] = indices.tolist()
    return numbers


@pytest.mark.parametrize("io", IOS)
def test_a_loader_that_was_closed_has_no_file_open_though_it_is_held(io: Io, loader_of: MakeLoader) -> None:
    before = num_descriptors()
    iterator = iter(loader := loader_of(io))
    next(iterator)
    loader.close()
    assert num_descriptors() == before


@pytest.mark.parametrize("io", ["pread", "direct"])
def test_reads_wait_in_more_threads_than_copies_and_what_is_asked_for_is_obeyed(io: Io, loader_of: MakeLoader) -> None:
    with loader_of(io) as loader, loader_of("mmap") as mapped, loader_of(io, num_threads=3) as three:
        assert loader.stats()["num_threads"] == 8
        assert mapped.stats()["num_threads"] == min(4, usable_cores())
        assert three.stats()["num_threads"] == 3


def test_only_the_samples_to_read_need_fit_in_memory(loader_of: MakeLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardio.reading.choose, "memory_left", lambda: 20 * 90 + RESERVED)
    monkeypatch.setattr("shardio.reading.shardset.ShardSet.resident_share", lambda shards, name="": 0.5)
    with loader_of("auto") as loader:
        assert loader.stats()["io"] in ("direct", "pread")
        assert "do not fit" in loader.stats()["io_reason"]
    with loader_of("auto", indices=torch.arange(15)) as loader:
        assert loader.stats()["io"] == "mmap"


@pytest.mark.parametrize("ranks", [1, 8])
def test_the_batches_of_all_ranks_of_the_node_need_memory_too(
    loader_of: MakeLoader, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr("shardio.reading.shardset.ShardSet.resident_share", lambda shards, name="": 0.5)
    enough = NUM_SAMPLES * 90 / 0.75 + ranks * RESERVED
    for left, engines in ((enough + 2, ["mmap"]), (enough - 2, ["direct", "pread"])):
        monkeypatch.setattr(shardio.reading.choose, "memory_left", partial(int, left))
        with loader_of("auto", rank=3, world_size=8) as loader:
            assert loader.stats()["io"] in engines


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """What is announced, ("hint", samples), and what is read, ("read", samples), in order."""
    events: Events = []
    copy = MappedReader.copy

    def read(reader: MappedReader, name: str, indices: NDArray[np.int64], *out: Any) -> None:
        events.append(("read", tuple(indices.tolist())))
        copy(reader, name, indices, *out)

    def hint(reader: MappedReader, request: Request) -> None:
        events.append(("hint", tuple(request.indices.tolist())))

    changed = {"begin_epoch": lambda reader: True, "min_part_nbytes": 0, "copy": read, "will_read": hint}
    for name, value in changed.items():
        monkeypatch.setattr(MappedReader, name, value)
    return events


@pytest.mark.parametrize(("depth", "prefetch"), [(0, 2), (1, 0), (8, 2)])
def test_each_batch_is_announced_once_before_it_is_read_and_not_too_early(
    depth: int, prefetch: int, loader_of: MakeLoader, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    def those(kind: str) -> list[tuple[int, ...]]:
        return [indices for name, indices in events if name == kind]

    monkeypatch.setattr("shardio.loading.pipeline.read_ahead_batches", lambda nbytes, left: depth)
    with loader_of("mmap", batch_size=3, prefetch=prefetch, num_threads=1, tail="short") as loader:
        for epoch in range(2):
            events.clear()
            order = [tuple(indices.tolist()) for indices in loader._position.sampler.batches(epoch)]
            for number, batch in enumerate(loader):
                check(batch)
                most = min(len(order), number + 1 + prefetch + depth)
                assert len(those("hint")) <= most
                until(lambda: len(those("hint")) == most)  # noqa: B023
            assert those("hint") == those("read") == order
            for indices in order:
                assert events.index(("hint", indices)) < events.index(("read", indices))
        assert loader.stats()["read_ahead_batches"] == 2 * len(order)


def test_a_resident_set_is_not_announced(loader_of: MakeLoader) -> None:
    with loader_of("mmap") as loader:
        list(loader)
        assert loader.stats()["read_ahead_batches"] == 0


@pytest.mark.parametrize("closed", [False, True])
def test_hints_of_an_iterator_that_was_dropped_or_closed_are_not_passed_on(
    closed: bool, loader_of: MakeLoader, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    hinted = []

    def slow(reader: MappedReader, request: Request) -> None:
        hinted.append(tuple(request.indices.tolist()))
        if len(hinted) == 3:
            entered.set()
            until(lambda: go_on.is_set() or loader._pipeline._threads._closed[0])
        raise LookupError("a hint that fails is no error")

    monkeypatch.setattr(MappedReader, "will_read", slow)
    with loader_of("mmap", batch_size=3, num_threads=1, prefetch=0) as loader:
        iterator = iter(loader)
        check(next(iterator))
        assert entered.wait(DEADLINE_SECONDS)  # and behind it, more are queued
        if not closed:
            del iterator
            go_on.set()
            pipeline = loader._pipeline
            pipeline._threads.submit(pipeline.reader, Request(np.arange(3)), pipeline._ring.acquire()).wait()
            assert len(hinted) == 3
            hinted.clear()
            list(loader)
            assert hinted == [tuple(indices.tolist()) for indices in loader._position.sampler.batches(1)]
    assert not closed or len(hinted) == 3
