"""A sweep's measurements, their order, and how its figures are related. No test asks how fast anything is."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from copiers import FakeCopier

import shardio.loading.loader
import shardio.measure.bench
import shardio.measure.limits
import shardio.reading.choose
from shardio.augment import CenterCrop
from shardio.cli.bench import python_line, summary
from shardio.cli.main import cli
from shardio.loading.loader import ShardLoader
from shardio.measure.bench import Sweep, bench, candidates
from shardio.measure.limits import Steps
from shardio.measure.result import BenchResult, Combination, LimitSpeed, LoaderSpeed, Speed
from shardio.reading.choose import ReaderFacts, choose
from shardio.reading.shardset import open_shards

PAGES = (64, 64, 1)
"""The shape of samples of a page, which O_DIRECT can read anywhere."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardio.measure.limits, "BLOCK_NBYTES", 1 << 16)


@pytest.fixture
def path(make_set: Callable[..., Path]) -> Path:
    return make_set(30, PAGES, 10)


def quick(path: Path, **options: Any) -> BenchResult:
    values = {"rounds": 1, "seconds": 0.001, "batch_sizes": (4,), "num_threads": (1,), **options}
    sweep = Sweep(**{field.name: values.pop(field.name) for field in fields(Sweep) if field.name in values})
    return bench(path, sweep, **values)


def no_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardio.reading.choose, "direct_alignment", lambda path: None)
    for module in (shardio.reading.choose, shardio.measure.limits):
        monkeypatch.setattr(module, "filesystem_kind", lambda path: "oldfs")


def has_direct(path: Path) -> bool:
    return shardio.measure.limits.why_no_direct_reads(shardio.measure.bench.open_shards(path)) is None


def test_every_combination_is_measured_once(path: Path) -> None:
    result = quick(path, batch_sizes=(4, 8), ios=("mmap", "pread"), num_threads=(1, 3), prefetches=(0, 2))
    swept = itertools.product([4, 8], ["mmap", "pread"], [1, 3], [0, 2])
    assert [loader.combination for loader in result.loaders] == [Combination("cpu", *values) for values in swept]
    for loader in result.loaders:
        assert loader.engine == loader.combination.io
        assert len(loader.speed.seconds) == len(loader.first_batch_seconds) == 1


def test_what_the_loader_chooses_is_named_and_measured_once(path: Path) -> None:
    with ShardLoader(path, 4, device="cpu") as loader:
        chosen, engine = loader.num_threads, loader.stats()["io"]
    report = quick(path, num_threads=(None, chosen, None))
    (result,) = report.loaders
    assert result.combination == Combination("cpu", 4, "auto", chosen, 2)
    assert result.engine == engine
    assert result.io_reason
    assert next(Sweep().combinations(300)).batch_size == 256


def test_limits_are_measured_once_and_np_take_for_each_batch_size(path: Path) -> None:
    result = quick(path, batch_sizes=(4, 8), num_threads=(1, 2))
    assert [(limit.kind, limit.batch_size) for limit in result.limits] == [
        *(("memcpy", None), ("take", 4), ("take", 8)),
        *([("direct", None)] * has_direct(path)),
    ]
    for loader in result.loaders:
        ratios = result.ratios(loader)
        bounding = [limit for limit in result.limits if limit.batch_size in (None, loader.combination.batch_size)]
        assert ratios == {limit.kind: loader.speed.ratio_to(limit.speed) for limit in bounding}
        for limit in bounding:
            expected = loader.speed.images_per_second / limit.speed.images_per_second
            assert ratios[limit.kind] == pytest.approx(expected)


def measured(gains: dict[tuple[int, int], float]) -> BenchResult:
    """A result of loaders with these (threads, prefetch) and speeds, in three rounds of a machine that changes."""
    loaders = [
        LoaderSpeed(
            Combination("cpu", 8, "auto", threads, prefetch), "mmap", "", Speed([n / gain for n in (1.0, 7.0, 2.0)])
        )
        for (threads, prefetch), gain in gains.items()
    ]
    return BenchResult("a set", "val", "0", 10, (8, 8, 3), 1.0, {}, 3, 0.1, [], {}, loaders)


@pytest.mark.parametrize(
    ("gains", "threads", "gain", "line"),
    [
        ({(2, 2): 1.0, (4, 2): 1.04}, 2, 1.0, "ShardLoader('a set', batch_size=8, split='val')"),
        ({(2, 2): 1.0, (4, 2): 1.5}, 4, 1.5, "ShardLoader('a set', batch_size=8, split='val', num_threads=4)"),
        ({(2, 2): 1.0, (8, 2): 1.5, (1, 4): 1.48}, 1, 1.48, "batch_size=8, split='val', num_threads=1, prefetch=4)"),
    ],
)
def test_the_default_wins_unless_another_way_is_clearly_faster_and_the_cheapest_of_the_fast_ways(
    gains: dict[tuple[int, int], float], threads: int, gain: float, line: str
) -> None:
    report = measured(gains)
    chosen, found = report.fastest()
    assert chosen.combination.num_threads == threads
    assert found == pytest.approx(gain)
    assert python_line(report, chosen).endswith(line)


@pytest.mark.parametrize(
    ("cores", "fits", "alignment"), [(1, True, 512), (6, True, 512), (6, False, 512), (96, False, None)]
)
def test_candidates_begin_with_the_default_and_are_what_the_machine_can_do(
    cores: int, fits: bool, alignment: int | None, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = ReaderFacts("ext4", 100, 0.0, 1000 if fits else 10, alignment)
    monkeypatch.setattr(shardio.measure.bench, "look_at", lambda shards, count, tables: facts)
    monkeypatch.setattr(shardio.measure.bench, "usable_cores", lambda: cores)
    sweep = candidates(open_shards(path))
    first, *others = sweep.combinations(30)
    assert first == Combination("cpu", 30, "auto", None, 2)
    assert first not in others
    assert sweep.fresh == (not fits)
    threads = [count for count in sweep.num_threads if count is not None]
    assert (threads[0], max(threads)) == (1, {(1, True): 1, (6, True): 4, (6, False): 8, (96, False): 64}[cores, fits])
    assert ("direct" in sweep.ios or choose(facts).engine == "direct") == (not fits and alignment is not None)


def test_the_command_prints_the_fastest_line_as_text_and_json(path: Path, tmp_path: Path) -> None:
    (tmp_path / "chain.json").write_text(json.dumps(CenterCrop(8).to_dict()))
    words = ["bench", str(path), "--tune", "--batch-size", "8", "--threads", "1,2", "--prefetch", "1"]
    words += ["--transform", str(tmp_path / "chain.json"), "--rounds", "1", "--seconds", "0.01"]
    text = CliRunner().invoke(cli, words, catch_exceptions=False).stdout
    assert text.splitlines()[-1].startswith(f"  ShardLoader('{path}', batch_size=8")
    told = json.loads(CliRunner().invoke(cli, [*words, "--json"], catch_exceptions=False).stdout)
    assert told["fastest"]["line"].startswith("ShardLoader(")
    assert told["fastest"]["gain"] >= 1


def test_a_ratio_is_the_median_of_the_ratios_of_the_rounds() -> None:
    ours, theirs = Speed([1.0, 2.0, 4.0]), Speed([4.0, 2.0, 12.0])
    assert (ours.ratio_to(theirs), ours.images_per_second) == (3.0, 0.5)


class Clock:
    """Time that passes only where a step says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        clock = SimpleNamespace(perf_counter=lambda: self.now, process_time=lambda: 10 * self.now)
        monkeypatch.setattr(shardio.measure.bench, "time", clock)


@pytest.mark.parametrize(
    ("again", "seeds", "seconds", "count"), [(True, [6, 6], 30, 10), (False, [6, 7], 30, 10), (True, [6, 6], 1, 1)]
)
def test_the_second_pass_is_measured_and_without_its_first_steps(
    again: bool, seeds: list[int], seconds: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
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
    shardio.measure.bench._measure(speed, steps, 3, seconds=seconds, again=again, lead=5)
    assert passes == closed == seeds
    assert speed.seconds == [2 / 8]
    assert speed.cpu_seconds == [20 / 8]
    assert clock.now == (5 * 100 + count * 3) + (5 * 100 + count * 2)


@pytest.mark.parametrize("io", ["mmap", "pread", "direct"])
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
    quick(path, ios=(io,), rounds=3)
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


def test_only_one_way_at_a_time_has_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []

    def counted(steps: Callable[..., Steps]) -> Callable[..., Steps]:
        def run(*arguments: Any) -> Steps:
            assert not opened
            opened.append(steps)
            try:
                yield from steps(*arguments)
            finally:
                opened.remove(steps)

        return run

    for name in ("memcpy", "take", "direct_reads"):
        monkeypatch.setattr(shardio.measure.limits, name, counted(getattr(shardio.measure.limits, name)))
    open_loader = shardio.measure.bench._open
    loaders: list[ShardLoader] = []

    def spy(*arguments: Any) -> ShardLoader:
        assert not opened
        assert all(loader.closed for loader in loaders)
        loaders.append(open_loader(*arguments))
        return loaders[-1]

    monkeypatch.setattr(shardio.measure.bench, "_open", spy)
    quick(path, rounds=2, batch_sizes=(4, 8), num_threads=(1, 2))
    assert len(loaders) == 4 + 2 * 4  # to look at them, and for each turn
    assert all(loader.closed for loader in loaders)


def test_ways_take_turns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def measure(speed: Speed, *arguments: Any, **options: Any) -> None:
        measured.append(id(speed))
        speed.seconds.append(1.0)

    monkeypatch.setattr(shardio.measure.bench, "_measure", measure)
    turns: list[tuple[int, int]] = []
    report = quick(path, rounds=3, num_threads=(1, 2), on_turn=lambda done, total: turns.append((done, total)))
    ways = [id(way.speed) for way in (*report.limits, *report.loaders)]
    assert measured == ways * 3
    total = len(measured)
    assert turns == [(done, total) for done in range(1, total + 1)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ios": ("mmap", "direct")}, "O_DIRECT does not work on oldfs"),
        ({"ios": ("mmap", "fast")}, "io must be one of auto, mmap, pread, direct; found 'fast'"),
        ({"batch_sizes": (4, 31)}, "30 samples are fewer than the global batch of 31"),
        ({"prefetches": (2, -1)}, "prefetch at least 0"),
        ({"devices": ("cpu", "cuda:9")}, "sees here: cuda:0 to cuda:0; found 'cuda:9'"),
        ({"devices": ("cpu", "gpu")}, 'device must be "cpu", "cuda" or "cuda:N"; found .gpu.'),
        ({"devices": ("cpu", "meta")}, "device must be a CPU or a CUDA device"),
    ],
)
def test_what_cannot_work_is_an_error_before_anything_is_measured(
    options: dict[str, Any], expected: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_direct(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
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
    assert "direct" not in {limit.kind for limit in report.limits}
    assert "direct" not in report.ratios(report.loaders[0])
    assert "left out: O_DIRECT reads: O_DIRECT does not work on oldfs" in summary(report)


def test_json_has_everything(path: Path) -> None:
    found = json.loads(json.dumps(quick(path, rounds=2).to_dict()))
    assert (found["path"], found["split"], found["num_samples"]) == (str(path), "train", 30)
    assert (found["sample_shape"], found["rounds"], found["seconds"]) == ([64, 64, 1], 2, 0.001)
    assert {"digest", "resident_share", "left_out"} < set(found)
    assert {"cores", "filesystem", "kernel", "shardio", "torch"} < set(found["machine"])
    (loader,) = found["loaders"]
    assert {"device", "batch_size", "io", "num_threads", "prefetch", "engine", "io_reason"} < set(loader)
    assert set(loader["ratios"]) == {limit["kind"] for limit in found["limits"]}
    for speed in (*found["limits"], loader):
        assert speed["gigabytes_per_second"] == pytest.approx(speed["images_per_second"] * 4096e-9, rel=1e-3)
        assert speed["cpu_microseconds_per_image"] >= 0
        slowest, fastest = speed["images_per_second_range"]
        assert slowest <= speed["images_per_second"] <= fastest


# The GPU is a double here: its copies are unfinished until the host waits for them.


class FakeDevice:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copiers: list[FakeCopier] = []
        self.unfinished = 0
        self.waits = 0
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a double of {device}")
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(shardio.loading.loader, "make_copier", self.make_copier)
        monkeypatch.setattr(shardio.measure.limits, "pinned_empty", lambda shape: torch.empty(shape, dtype=torch.uint8))
        monkeypatch.setattr(shardio.measure.limits, "device_empty", lambda shape, device: self)

    def make_copier(self, device: torch.device) -> FakeCopier | None:
        if device.type == "cpu":
            return None
        self.copiers.append(FakeCopier())
        return self.copiers[-1]

    def copy_(self, source: torch.Tensor, *, non_blocking: bool) -> None:
        self.unfinished += 1

    def synchronize(self, device: torch.device) -> None:
        assert device == torch.device("cuda:0")
        self.waits += 1
        self.unfinished = 0
        for copier in self.copiers:
            copier.synchronize()

    def idle(self) -> bool:
        return not self.unfinished and not any(copier.unfinished for copier in self.copiers)


def test_a_gpu_has_the_limit_of_pinned_copies_of_its_batches(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDevice(monkeypatch)
    result = quick(path, devices=("cpu", "cuda"), batch_sizes=(4, 8))
    pinned = {limit.batch_size: limit for limit in result.limits if limit.kind == "pinned_copy"}
    assert [(limit.device, size) for size, limit in pinned.items()] == [("cuda:0", 4), ("cuda:0", 8)]
    for loader in result.loaders:
        ratio = result.ratios(loader).get("pinned_copy")
        on_gpu = loader.combination.device == "cuda:0"
        assert ratio == (loader.speed.ratio_to(pinned[loader.combination.batch_size].speed) if on_gpu else None)
    assert result.machine["devices"] == {"cuda:0": "a double of cuda:0"}


def test_the_clock_is_read_only_when_the_device_has_done_everything(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice(monkeypatch)
    unmeasured = shardio.measure.bench._measure
    idle: list[bool] = []

    def process_time() -> float:  # it is asked for around the measurement, and nowhere else
        idle.append(device.idle())
        return float(len(idle))

    clock = SimpleNamespace(perf_counter=shardio.measure.bench.time.perf_counter, process_time=process_time)
    monkeypatch.setattr(shardio.measure.bench, "time", clock)
    busy: list[bool] = []

    def measure(speed: Speed, steps: Callable[[int], Steps], *arguments: Any, **options: Any) -> None:
        def watched(seed: int) -> Iterator[int]:
            stream = steps(seed)
            try:
                for count in stream:
                    busy.append(not device.idle())
                    yield count
            finally:
                stream.close()

        unmeasured(speed, watched, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(shardio.measure.bench, "_measure", measure)
    report = quick(path, devices=("cuda:0",))
    assert any(busy)  # or this test would prove nothing
    assert idle == [True] * 2 * len([*report.limits, *report.loaders])


# The table.


def made_up_result(everything: bool) -> BenchResult:
    """A sweep with figures as large as they come."""
    fast = Speed([1 / 1_234_567], [0.001])
    options = [
        [("cpu", "cuda:0"), (64, 2048), ("auto", "direct"), (1, 16), (0, 16)],
        [("cpu",), (256,), ("auto",), (1, 16), (2,)],
    ][not everything]
    loaders = [
        LoaderSpeed(Combination(*values), "direct", "why", fast, [12.345])  # type: ignore[arg-type]
        for values in itertools.product(*options)  # type: ignore[call-overload]
    ]
    found = [LimitSpeed("memcpy", speed=fast), LimitSpeed("direct", speed=Speed([1.0], [1.0]))]
    for size in dict.fromkeys(loader.combination.batch_size for loader in loaders):
        found.append(LimitSpeed("take", size, speed=fast))
        if everything:
            found.append(LimitSpeed("pinned_copy", size, "cuda:0", fast))
    machine = {"cores": 128, "kernel": "avx512", "filesystem": "fuse.sshfs", "devices": {}}
    return BenchResult("out", "train", "0", 10**7, (2048, 2048, 3), 0.5, machine, 7, 0.5, found, {}, loaders)


@pytest.mark.parametrize("everything", [True, False])
def test_the_table_has_a_line_of_at_most_100_characters_for_everything(everything: bool) -> None:
    report = made_up_result(everything)
    lines = list(summary(report))
    assert max(map(len, lines)) <= 100
    assert sum("1,234,567" in line for line in lines) == len(report.loaders) + len(report.limits) - 1
    assert sum("12345" in line for line in lines) == len(report.loaders)
    assert any(line.endswith(" -") for line in lines) == everything  # a loader on the CPU has no limit of pinned copies
    assert lines[lines.index("io auto is direct here:") + 1] == "  why"
    # An option with one value stands above the table.
    assert ("ShardLoader: device cpu, batch 256, io auto, prefetch 2" in lines) == (not everything)
