"""The measurements of a loader and the limits, their order, and how figures are related. No test asks how fast
anything is."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from halved import make_halved_set
from simulated_cuda import Simulation

import shardio.measure.bench
import shardio.measure.limits
import shardio.reading.choose
from shardio.cli.train import summary
from shardio.loading.loader import ShardLoader
from shardio.measure.bench import BenchResult, LimitKind, Speed, bench
from shardio.measure.limits import Steps

PAGES = (64, 64, 1)
"""The shape of samples of a page, which O_DIRECT can read anywhere."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardio.measure.limits, "BLOCK_NBYTES", 1 << 16)


@pytest.fixture
def path(make_set: Callable[..., Path]) -> Path:
    return make_set(30, PAGES, 10)


def quick(path: Path, **options: Any) -> BenchResult:
    return bench(path, **{"rounds": 1, "seconds": 0.001, "batch_size": 4, "num_threads": 1, "device": "cpu", **options})


def no_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardio.reading.choose, "direct_alignment", lambda path: None)
    for module in (shardio.reading.choose, shardio.measure.limits):
        monkeypatch.setattr(module, "filesystem_kind", lambda path: "oldfs")


def has_direct(path: Path) -> bool:
    return shardio.measure.limits.why_no_direct_reads(shardio.measure.bench.open_shards(path)) is None


def test_a_ratio_is_the_median_of_the_ratios_of_the_rounds() -> None:
    ours, theirs = Speed([1.0, 2.0, 4.0]), Speed([4.0, 2.0, 12.0])
    assert (ours.ratio_to(theirs), ours.images_per_second) == (3.0, 0.5)


@pytest.mark.parametrize(
    ("again", "seeds", "seconds", "count"), [(True, [6, 6], 30, 10), (False, [6, 7], 30, 10), (True, [6, 6], 1, 1)]
)
def test_the_second_pass_is_measured_and_without_its_first_steps(
    again: bool, seeds: list[int], seconds: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    time = SimpleNamespace(perf_counter=lambda: clock.now, process_time=lambda: 10 * clock.now)
    monkeypatch.setattr(shardio.measure.bench, "time", time)
    passes: list[int] = []
    closed: list[int] = []

    def steps(seed: int) -> Steps:
        number = len(passes)
        passes.append(seed)
        try:
            for step in itertools.count():
                # Memory costs much when it is touched for the first time, which is mostly in the first pass.
                clock.now += 100 if step < 5 else (3 if number == 0 else 2)
                yield 8
        finally:
            closed.append(seed)

    speed = Speed()
    cpu = torch.device("cpu")
    shardio.measure.bench._measure(speed, steps, 3, seconds=seconds, again=again, lead=5, device=cpu)
    assert passes == closed == seeds
    assert speed.seconds == [2 / 8]
    assert speed.cpu_seconds == [20 / 8]
    assert clock.now == (5 * 100 + count * 3) + (5 * 100 + count * 2)


@pytest.mark.parametrize("io", ["mmap", "direct"])
def test_a_loader_reads_the_same_epoch_twice_unless_past_the_page_cache(
    io: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if io == "direct" and not has_direct(path):
        pytest.skip("O_DIRECT does not work here")
    epochs: list[int] = []
    batches = shardio.measure.bench._batches

    def spy(loader: ShardLoader, epoch: int) -> Steps:
        epochs.append(epoch)
        return batches(loader, epoch)

    monkeypatch.setattr(shardio.measure.bench, "_batches", spy)
    quick(path, io=io, rounds=3)
    assert epochs == ([0, 1, 2, 3, 4, 5] if io == "direct" else [0, 0, 2, 2, 4, 4])


def test_batches_of_an_epoch_come_again_and_go_on_with_the_next(path: Path) -> None:
    with ShardLoader(path, 4, device="cpu") as loader:
        seen: list[list[int]] = []
        for _ in range(2):
            steps = shardio.measure.bench._batches(loader, 5)
            assert list(itertools.islice(steps, 16)) == [4] * 16  # an epoch has 7
            seen.append([loader.state_dict()["epoch"], loader.state_dict()["consumed"]])
            steps.close()
        assert seen[0] == seen[1] == [7, 8]


def test_the_consumer_keeps_no_batches(path: Path) -> None:
    with ShardLoader(path, 4, device="cpu") as loader:
        for _ in itertools.islice(shardio.measure.bench._batches(loader, 0), 50):
            pass
        assert loader.stats()["slots"] <= loader.prefetch + shardio.measure.bench._SLOTS_BEYOND_PREFETCH


def test_ways_take_turns_and_only_one_at_a_time_has_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    begun: list[str] = []

    def counted(name: str, steps: Callable[..., Steps]) -> Callable[..., Steps]:
        def run(*arguments: Any) -> Steps:
            assert not opened
            opened.append(name)
            begun.append(name)
            try:
                yield from steps(*arguments)
            finally:
                opened.remove(name)

        return run

    ways = ["memcpy", "take", *(["direct_reads"] if has_direct(path) else [])]
    for name in ways:
        monkeypatch.setattr(shardio.measure.limits, name, counted(name, getattr(shardio.measure.limits, name)))
    loaders: list[ShardLoader] = []

    def spy(*arguments: Any, **options: Any) -> ShardLoader:
        assert not opened
        assert all(loader.closed for loader in loaders)
        begun.append("loader")
        loaders.append(ShardLoader(*arguments, **options))
        return loaders[-1]

    monkeypatch.setattr(shardio.measure.bench, "ShardLoader", spy)
    turns: list[tuple[int, int]] = []
    quick(path, rounds=2, on_turn=lambda done, total: turns.append((done, total)))
    passes = [name for name in ways for _ in range(2)]
    assert begun == ["loader", *[*passes, "loader"] * 2]  # the first to look at it
    assert turns == [(done, 2 * (len(ways) + 1)) for done in range(1, 2 * (len(ways) + 1) + 1)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"io": "direct"}, "oldfs"),
        ({"batch_size": 31}, "batch of 31"),
    ],
)
def test_what_cannot_work_is_an_error_before_anything_is_measured(
    options: dict[str, Any], expected: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_direct(monkeypatch)
    turns: list[int] = []
    with pytest.raises(ValueError, match=expected):
        quick(path, on_turn=lambda done, total: turns.append(done), **options)
    assert turns == []


def test_a_limit_that_cannot_be_measured_is_left_out_with_its_reason(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_direct(monkeypatch)
    report = quick(path)
    assert report.left_out == {"direct": "O_DIRECT does not work on oldfs"}
    assert [*report.limits] == ["memcpy", "take"]
    assert "left out: O_DIRECT reads: O_DIRECT does not work on oldfs" in summary(report)


def test_gigabytes_are_of_stored_bytes(tmp_path: Path) -> None:
    found = quick(make_halved_set(tmp_path / "halved", 30)).to_dict()
    for speed in (*found["limits"].values(), found["loader"]):
        stored = speed["images_per_second"] * 10 * 14 * 1.5e-9
        assert speed["gigabytes_per_second"] == pytest.approx(stored, rel=1e-3)


def test_json_has_everything(path: Path) -> None:
    found = json.loads(json.dumps(quick(path, rounds=2, batch_size=None, num_threads=None).to_dict()))
    with ShardLoader(path, 30, device="cpu") as loader:
        chosen = {name: loader.stats()[name] for name in ("num_threads", "io")}
    assert found["options"].pop("io_reason")
    assert found["options"] == {"batch_size": 30, "prefetch": 2, "device": "cpu", **chosen}
    assert (found["path"], found["split"], found["num_samples"]) == (str(path), "train", 30)
    assert (found["sample_shape"], found["rounds"], found["seconds"]) == ([64, 64, 1], 2, 0.001)
    assert {"digest", "resident_share", "left_out", "mix", "first_batch_seconds"} < set(found)
    assert {"cores", "filesystem", "shardio", "torch"} < set(found["machine"])
    assert [*found["limits"]] == ["memcpy", "take", *(["direct"] if has_direct(path) else [])]
    for limit in found["limits"].values():
        assert limit["ratio"] > 0
    for speed in (*found["limits"].values(), found["loader"]):
        assert speed["cpu_microseconds_per_image"] >= 0
        slowest, fastest = speed["images_per_second_range"]
        assert slowest <= speed["images_per_second"] <= fastest


def test_a_gpu_has_the_limit_of_pinned_copies(path: Path) -> None:
    with Simulation():
        result = quick(path, device="cuda")
    assert [*result.limits][-1] == "pinned_copy"
    assert (result.options["device"], result.machine["gpu"]) == ("cuda:0", "a stand-in for CUDA")


@pytest.mark.parametrize("waits", [True, False])
def test_the_clock_is_read_only_when_the_device_has_done_everything(
    waits: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Simulation(haste=0.0)
    idle: list[bool] = []

    def process_time() -> float:  # it is asked for around the measurement, and nowhere else
        idle.append(not any(stream.queue for stream in device.streams))
        return float(len(idle))

    clock = SimpleNamespace(perf_counter=shardio.measure.bench.time.perf_counter, process_time=process_time)
    monkeypatch.setattr(shardio.measure.bench, "time", clock)
    if not waits:  # or this test would prove nothing
        monkeypatch.setattr(shardio.measure.limits, "synchronize", lambda device: None)
    with device:
        report = quick(path, device="cuda:0")
        device.synchronize()
    assert len(idle) == 2 * (len(report.limits) + 1)
    assert all(idle) == waits


def test_the_table_has_a_line_of_at_most_100_characters_for_every_speed(path: Path) -> None:
    fast = Speed([1 / 1_234_567], [0.001])
    kinds: tuple[LimitKind, ...] = ("memcpy", "take", "direct", "pinned_copy")
    machine = {"cores": 128, "filesystem": "fuse.sshfs", "gpu": "NVIDIA H200"}
    options = {"device": "cuda:0", "batch_size": 2048, "prefetch": 16, "num_threads": 16, "io": "direct"}
    options["io_reason"] = "why"
    shape = {"path": "out", "num_samples": 10**7, "sample_shape": (2048, 2048, 3), "sample_nbytes": 2048**2 * 3}
    speeds = {"limits": dict.fromkeys(kinds, fast), "left_out": {}, "loader": Speed([2 / 1_234_567], [0.001])}
    report = replace(quick(path), machine=machine, options=options, first_batch_seconds=[12.345], **shape, **speeds)
    lines = list(summary(report))
    assert max(map(len, lines)) <= 100
    rows = [line for line in lines if "1,234,567" in line]
    assert [line.split()[-1] for line in rows] == ["0.50"] * 4
    assert any(line.startswith("ShardLoader ") and "617,284" in line for line in lines)
    assert lines[-3:] == [
        "ShardLoader: device cuda:0, batch 2048, threads 16, prefetch 16, io direct",
        "  why",
        "  12345 ms from opening the set to the first batch",
    ]
