"""Is it the loader? Reports tell what limits: from exact numbers, and of real loaders with made-up troubles."""

from __future__ import annotations

import hashlib
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from numpy.typing import NDArray

import shardio.loading.report
from shardio.loading.loader import ShardLoader
from shardio.loading.report import Counts, LoaderFacts, LoaderReport, Meter, Snapshot
from shardio.loading.world import World
from shardio.reading.reader import MappedReader

FACTS = LoaderFacts(num_threads=2, num_cores=8, prefetch=2, world=World(0, 1, None, "default"))
COPYING: dict[str, Any] = {"wait_seconds": 3.0, "gather_seconds": 19.0, "gather_cpu_seconds": 18.0}


def report_of(
    no_core: float = 0.0, waiting: float = 0.0, facts: LoaderFacts = FACTS, storage: float = 0.0, **counts: float
) -> LoaderReport:
    made = Counts(**{"batches": 100, "images": 25_600, "nbytes": 1000, "loop_seconds": 10.0, **counts})  # type: ignore[arg-type]
    return LoaderReport.between(Snapshot(Counts()), Snapshot(made, no_core, storage, waiting), facts)


@pytest.mark.parametrize(
    ("counts", "stage", "advice"),
    [
        ({"wait_seconds": 0.4}, "consumer", "data is not your bottleneck"),
        ({"wait_seconds": 3.0, "first_wait_seconds": 3.0}, "consumer", "data is not your bottleneck"),
        ({**COPYING}, "gather", "try num_threads=8"),
        ({**COPYING, "facts": replace(FACTS, prefetch=0)}, "gather", "try prefetch=2"),
        ({**COPYING, "facts": replace(FACTS, num_threads=8)}, "gather", "copies no faster"),
        ({**COPYING, "gather_cpu_seconds": 2.0}, "storage", "cache="),
        ({**COPYING, "gather_cpu_seconds": 9.0, "no_core": 8.0}, "gather", "no core"),
        ({**COPYING, "storage": 900}, "storage", "cache="),
        ({"wait_seconds": 1.0, "stall_seconds": 2.0}, "copy", "copies to the device"),
        ({"wait_seconds": 1.0, "transform_seconds": 4.0}, "transform", "simplify"),
        ({"transform_seconds": 4.0}, "consumer", "data is not your bottleneck"),
        ({"loop_seconds": 0.0, "batches": 0, "images": 0, "waiting": 9.0}, "storage", "cache="),
    ],
)
def test_the_stage_that_limits_and_what_to_do_follow_from_the_counts(
    counts: dict[str, Any], stage: str, advice: str
) -> None:
    report = report_of(**counts)
    assert report.stage == stage
    assert advice in report.advice
    assert report.line in str(report) == repr(report)


def test_shares_are_of_the_loop_s_time_without_first_batches() -> None:
    report = report_of(wait_seconds=3.0, first_wait_seconds=2.0, stall_seconds=1.0, transform_seconds=0.8)
    assert report.seconds == 8.0
    assert report.waited == 2 / 8
    assert report.transformed == 0.1
    assert report.images_per_second == 2560
    assert report.line == "2,560 images/s, waited 25.0%, transform 10.0% of 8 s: gathering limits"


def test_any_counts_make_shares_and_a_line_of_a_terminal() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(300):
        counts = {name: rng.choice([0.0, rng.random(), rng.random() * 1e4]) for name in vars(Counts())}
        facts = replace(FACTS, world=World(rng.randrange(512), 512, None, "default"))
        report = report_of(rng.random(), rng.choice([0.0, 1e4 * rng.random()]), facts, **counts)
        assert 0 <= report.waited <= 1
        assert 0 <= report.transformed <= 1
        assert 0 <= report.blocked <= 1
        assert "\n" not in report.line
        assert report.advice


def test_a_wait_that_is_not_over_counts_as_far_as_it_has_come() -> None:
    meter = Meter(lambda: 0.0)
    meter.begin_epoch()
    meter.begin_wait()
    meter.end_wait()
    meter.received(256, 1000)
    meter.begin_wait()
    time.sleep(0.02)
    during = meter.snapshot()
    assert 0.02 <= during.waiting_seconds <= during.counts.wait_seconds <= during.counts.loop_seconds
    meter.end_wait()
    after = meter.snapshot()
    assert after.waiting_seconds == 0.0
    assert after.counts.wait_seconds >= during.counts.wait_seconds
    assert after.counts.images == 256


def busy(reader: object, indices: NDArray[np.int64], *more: object) -> None:
    """Computes for some milliseconds, and leaves the interpreter to others meanwhile, as copying does."""
    end = time.thread_time() + 0.03
    while time.thread_time() < end:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1000)


@pytest.mark.parametrize(
    ("stage", "read", "transform", "step"),
    [
        ("storage", lambda *_: time.sleep(0.03), None, 0.0),
        ("gather", busy, None, 0.0),
        ("transform", None, lambda images: time.sleep(0.008) or images, 0.0),
        ("consumer", lambda *_: time.sleep(0.008), None, 0.01),
    ],
)
def test_a_loader_tells_what_limits_its_job(
    stage: str,
    read: Callable[..., None] | None,
    transform: Callable[..., torch.Tensor] | None,
    step: float,
    make_set: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if read is not None:
        monkeypatch.setattr(MappedReader, "read", read)
    with ShardLoader(make_set(120), 4, device="cpu", num_threads=1, transform=transform) as loader:
        assert str(loader.report()) == "no batch has been requested yet"
        for _ in loader:
            time.sleep(step)
        report = loader.report()
        assert report.stage == stage == loader.stats()["limited_by"], report
        assert loader.stats()["waited"] == report.waited
        assert report.counts.batches == 30


def test_time_between_epochs_is_not_the_loop_s(make_set: Callable[..., Path]) -> None:
    with ShardLoader(make_set(20), 4, device="cpu") as loader:
        start = time.perf_counter()
        for _ in range(2):
            list(loader)
            time.sleep(0.05)
        assert 0.0 < loader.stats()["loop_seconds"] <= time.perf_counter() - start - 0.1


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that reports print."""
    lines: list[str] = []

    def note(line: str, **how: object) -> None:
        assert threading.current_thread().name == "shardio-report"
        lines.append(line)

    monkeypatch.setattr(shardio.loading.report, "print", note, raising=False)
    return lines


def test_a_line_is_printed_every_so_many_seconds_in_which_batches_are_asked_for(
    make_set: Callable[..., Path], printed: list[str]
) -> None:
    with ShardLoader(make_set(200), 4, device="cpu", report_every=0.02, rank=0, world_size=1) as loader:
        while len(printed) < 3:
            for _ in loader:
                pass
    count = len(printed)
    time.sleep(0.05)
    assert len(printed) == count
    assert all(re.match("shardio: [0-9,]+ images/s, waited ", line) for line in printed)


def test_a_consumer_that_waits_for_storage_is_told_of_meanwhile(
    make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, printed: list[str]
) -> None:
    monkeypatch.setattr(MappedReader, "read", lambda *what: time.sleep(0.01) if printed else time.sleep(1.5))
    with ShardLoader(make_set(20), 4, device="cpu", report_every=0.2) as loader:
        next(iter(loader))
    assert printed[0] == "shardio: no batch for 1 s: storage limits"


def test_a_stderr_that_is_closed_ends_nothing(make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    with ShardLoader(make_set(40), 4, device="cpu", report_every=0.001) as loader:
        for _ in range(3):
            list(loader)
