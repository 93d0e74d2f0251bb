"""Conversions in parts, in any order, twice or at once: the last part publishes the set that one process would make."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import assert_one_clear_error, run_forked, shardio
from conversions import OPTIONS as PLAIN
from conversions import Interrupt, failing_storage, rejects
from folders import flip, hashes, put
from pictures import encode, random_picture, write_jpeg
from PIL import Image

from shardio.conversion import claim
from shardio.conversion import convert as converter
from shardio.conversion.convert import Conversion, convert
from shardio.conversion.engine import Engine
from shardio.conversion.estimate import estimate
from shardio.conversion.options import Progress
from shardio.conversion.report import ConvertReport, UnfinishedParts
from shardio.errors import ConvertError

OPTIONS: dict[str, Any] = {**PLAIN, "order": "source"}
WORDS = ("--size", "16", "--shard-size", "6400", "--order", "source", "--workers", "1")


@pytest.mark.parametrize("seed", range(2))
def test_four_parts_in_any_order_and_one_of_them_twice_make_the_set(
    image_tree: Path, out: Path, finished: dict[str, str], seed: int
) -> None:
    order = [1, 2, 3, 4]
    random.Random(seed).shuffle(order)
    order.insert(random.Random(seed).randrange(1, 4), order[0])
    shards = {1: 2, 2: 2, 3: 1, 4: 1}
    done: set[int] = set()
    for number in order:
        seen: list[Progress] = []
        report = convert(image_tree, out, **OPTIONS, part=(number, 4), on_progress=seen.append)
        sources = 3 * shards[number]
        assert report.num_converted == (0 if number in done else sources)
        assert seen[-1] == Progress(sources, 0, sources, kept=sources - report.num_converted)
        done.add(number)
        if len(done) < 4:
            left = tuple(sorted(shards.keys() - done))
            assert report.unfinished == UnfinishedParts(6, sum(shards[one] for one in done), left)
            assert (report.digest, report.num_shards, report.num_sources) == ("", shards[number], sources)
            assert sum(report.num_samples.values()) == sources
            assert "manifest.json" not in hashes(out)
    assert report.unfinished is None
    assert report.num_samples == {"train": 12, "val": 6}
    assert hashes(out) == finished
    assert report.digest == convert(image_tree, out, **OPTIONS).digest


def test_parts_of_other_numbers_and_a_whole_conversion_go_on_with_each_others_shards(
    image_tree: Path, out: Path, finished: dict[str, str]
) -> None:
    assert convert(image_tree, out, **OPTIONS, part=(1, 2)).num_converted == 9
    assert convert(image_tree, out, **OPTIONS, part=(3, 3)).num_converted == 3  # the third and the sixth shard
    assert convert(image_tree, out, **OPTIONS).num_converted == 6
    assert hashes(out) == finished


def test_another_parts_shard_that_was_written_to_since_is_not_published(
    image_tree: Path, out: Path, finished: dict[str, str]
) -> None:
    convert(image_tree, out, **OPTIONS, part=(1, 2))
    shard = out / "train-00002.npy"
    flip(shard)
    os.utime(shard, (time.time() + 9, time.time() + 9))  # later than its record, however coarse the clock is
    with pytest.raises(ConvertError, match=shard.name):
        convert(image_tree, out, **OPTIONS, part=(2, 2))
    assert convert(image_tree, out, **OPTIONS, part=(2, 2)).unfinished == UnfinishedParts(6, 5, (1,))
    convert(image_tree, out, **OPTIONS, part=(1, 2))
    assert hashes(out) == finished


def test_parts_all_at_once_publish_one_set(image_tree: Path, tmp_path: Path, finished: dict[str, str]) -> None:
    for attempt in range(3):
        out, barrier = tmp_path / f"out-{attempt}", threading.Barrier(4)

        def work(number: int, out: Path = out, barrier: threading.Barrier = barrier) -> ConvertReport:
            barrier.wait(30)
            return convert(image_tree, out, **OPTIONS, part=(number, 3))

        with ThreadPoolExecutor(4) as pool:
            assert len(list(pool.map(work, (1, 2, 2, 3)))) == 4  # the second part twice at once
        assert hashes(out) == finished, attempt


@pytest.mark.parametrize(
    ("owner", "step"),
    [
        (claim, "_claim"),
        (Conversion, "_make_shards"),
        (converter, "without_record"),
        (converter, "load_records"),
        (Conversion, "_publish"),
    ],
)
def test_a_part_that_another_one_overtakes_has_the_set(
    image_tree: Path, out: Path, finished: dict[str, str], owner: Any, step: str, meanwhile: Callable[..., None]
) -> None:
    convert(image_tree, out, **OPTIONS, part=(1, 2))
    meanwhile(owner, step, lambda: convert(image_tree, out, **OPTIONS, part=(2, 2)))
    report = convert(image_tree, out, **OPTIONS, part=(2, 2))
    assert report.unfinished is None
    assert report.num_samples == {"train": 12, "val": 6}
    assert hashes(out) == finished


def test_a_part_that_begins_while_another_makes_its_first_shards_joins_it(
    image_tree: Path, out: Path, finished: dict[str, str], meanwhile: Callable[..., None]
) -> None:
    out.mkdir()
    meanwhile(os, "listdir", lambda: convert(image_tree, out, **OPTIONS, part=(1, 2)))
    convert(image_tree, out, **OPTIONS, part=(2, 2))
    assert hashes(out) == finished


def test_a_source_that_changed_since_another_part_took_it_is_left_to_that_part(
    image_tree: Path, out: Path, tmp_path: Path
) -> None:
    convert(image_tree, out, **OPTIONS, part=(1, 2))
    changed = image_tree / "train" / "n03" / "n03_0.JPEG"  # in the third shard
    write_jpeg(changed, random_picture(np.random.default_rng(99), 50, 50))
    assert convert(image_tree, out, **OPTIONS, part=(2, 2)).unfinished == UnfinishedParts(6, 5, (1,), differing=True)
    assert convert(image_tree, out, **OPTIONS, part=(1, 2)).num_converted == 3
    convert(image_tree, tmp_path / "reference", **OPTIONS)
    assert hashes(out) == hashes(tmp_path / "reference")


# --- all ranks of a job -----------------------------------------------------------------------------------------------

RANK = """
import errno, fcntl, os, signal, sys, time
from shardio.conversion.convert import convert

src, out, locks, most, marks, expected = sys.argv[1:]
if locks == "none":  # as between the nodes of some network filesystems

    def flock(*arguments):
        raise OSError(errno.ENOLCK, "no locks")

    fcntl.flock = flock

def on_progress(progress):
    if progress.waits:
        open(os.path.join(marks, str(os.getpid())), "x").close()
    while progress.done and len(os.listdir(marks)) < int(expected):
        time.sleep(0.01)
    if progress.done > int(most):
        os.kill(os.getpid(), signal.SIGKILL)

options = {"size": 16, "shard_size": 6400, "order": "source", "workers": 1, "on_progress": on_progress}
report = convert(src, out, **options, progress=int(most) == 99)  # a kill would leave a semaphore of the bar
print(report.num_converted, report.digest)
"""


@pytest.mark.parametrize(("locks", "killed_after"), [("some", 99), ("some", 7), ("none", 99)])
def test_ranks_that_convert_at_once_make_each_shard_once(
    image_tree: Path, out: Path, finished: dict[str, str], tmp_path: Path, locks: str, killed_after: int
) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "marks").mkdir()

    def rank(most: int, waiting: int) -> Any:
        return run_forked(tmp_path / "rank.py", image_tree, out, locks, str(most), tmp_path / "marks", str(waiting))

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(rank, killed_after, 3 if locks == "some" else 0)  # which converts until all others wait
        while not [*out.glob(".convert/*.lock")]:
            time.sleep(0.001)
        others = [pool.submit(rank, 99, 0) for _ in range(3)]
        ranks = [one.result() for one in (first, *others)]
    ranks.append(rank(99, 0))  # which comes late
    assert [rank.returncode for rank in ranks] == [0 if killed_after > 18 else -signal.SIGKILL, 0, 0, 0, 0]
    assert hashes(out) == finished
    made = [int(rank.stdout.split()[0]) for rank in ranks if rank.stdout]
    assert made[-1] == 0
    if locks == "some":  # else all of them may have made all
        assert sum(made) == (18 if killed_after > 18 else 12), made
        assert sum("waiting for process " in rank.stderr for rank in ranks) == 3
        assert sum("3 classes, n01 to n03" in rank.stderr for rank in ranks) == 1


# --- refused images ---------------------------------------------------------------------------------------------------


@pytest.fixture
def bad(image_tree: Path) -> list[str]:
    """Two bad sources in the first part of two, in its shards 1 and 3, and one in the second, in shard 6."""
    names = ["train/n01/n01_1.JPEG", "train/n02/n02_3.JPEG", "val/n03/n03_1.JPEG"]
    shutil.copytree(image_tree, image_tree.with_name("sound"))
    for name in names:
        (image_tree / name).write_bytes(b"")
    return names


def test_refused_images_of_other_parts_count_unless_they_were_mended_since(
    image_tree: Path, out: Path, bad: list[str]
) -> None:
    options = {**OPTIONS, "max_bad": 2}
    convert(image_tree, out, **options, part=(1, 2))
    with pytest.raises(ConvertError, match="at most 2 refused images of 18, found 3, 2 of them by other parts, after"):
        convert(image_tree, out, **options, part=(2, 2))
    assert [line["key"] for line in rejects(out)] == bad
    assert not (out / "manifest.json").exists()
    for name in bad[:2]:
        shutil.copyfile(image_tree.with_name("sound") / name, image_tree / name)
    assert convert(image_tree, out, **options, part=(2, 2)).unfinished == UnfinishedParts(6, 4, (1,), differing=True)
    assert convert(image_tree, out, **options, part=(1, 2)).refused == {"empty": 1}
    assert [line["key"] for line in rejects(out)] == bad[2:]


def test_what_parts_that_run_at_once_refuse_together_counts_before_publication(
    image_tree: Path, out: Path, bad: list[str], meanwhile: Callable[..., None]
) -> None:
    def other() -> None:
        report = convert(image_tree, out, **OPTIONS, max_bad=2, part=(2, 2))
        assert report.unfinished == UnfinishedParts(6, 3, (1,))

    meanwhile(Engine, "run", other)
    with pytest.raises(ConvertError, match="found 3, 1 of them by other parts, after 9"):
        convert(image_tree, out, **OPTIONS, max_bad=2, part=(1, 2))
    assert not (out / "manifest.json").exists()
    assert [line["key"] for line in rejects(out)] == bad


def test_a_part_that_accepts_less_than_what_another_has_published_leaves_that_alone(
    image_tree: Path, out: Path, bad: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Engine.run

    def after_the_other(engine: Engine, tasks: Any, report: Any, run_file: Path) -> Any:
        monkeypatch.undo()
        convert(image_tree, out, **OPTIONS, max_bad=3)
        published.update(hashes(out))
        report(3, 3)
        return real(engine, tasks, report, run_file)

    published: dict[str, str] = {}
    monkeypatch.setattr(Engine, "run", after_the_other)
    assert convert(image_tree, out, **OPTIONS, max_bad=2, part=(1, 2)).refused == {"empty": 3}
    assert hashes(out) == published


def test_what_a_part_could_not_read_is_refused_unless_that_part_is_run_again(
    image_tree: Path, out: Path, tmp_path: Path, finished: dict[str, str]
) -> None:
    for again in (False, True):
        out = tmp_path / f"out-{again}"
        with failing_storage("train/n01/n01_1.JPEG"):  # in the first shard
            convert(image_tree, out, **OPTIONS, max_bad=1, part=(1, 2))
        if again:
            assert convert(image_tree, out, **OPTIONS, part=(1, 2)).num_converted == 3
        report = convert(image_tree, out, **OPTIONS, max_bad=1, part=(2, 2))
        assert report.unfinished is None
        assert report.refused == ({} if again else {"unreadable": 1})
        assert (hashes(out) == finished) == again


def test_no_part_publishes_a_shard_that_is_being_made_again(
    image_tree: Path, out: Path, finished: dict[str, str], meanwhile: Callable[..., None]
) -> None:
    with failing_storage("train/n01/n01_1.JPEG"):
        convert(image_tree, out, **OPTIONS, max_bad=1, part=(1, 2))

    def other() -> None:
        report = convert(image_tree, out, **OPTIONS, max_bad=1, part=(2, 2))
        assert report.unfinished == UnfinishedParts(6, 5, (1,))

    meanwhile(Engine, "run", other)
    assert convert(image_tree, out, **OPTIONS, part=(1, 2)).unfinished is None
    assert hashes(out) == finished


def test_facts_about_pictures_are_exact_whoever_made_the_shards(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture, deep = random_picture(np.random.default_rng(0), 40, 40), np.full((40, 40), 60_000, np.uint16)
    pictures: list[tuple[int, Any, str, dict[str, Any]]] = [
        (5, picture, "TIFF", {"tiffinfo": {274: 3}}),
        (4, picture, "JPEG", {"exif": exif}),
        (3, np.full((40, 40, 4), 99, np.uint8), "PNG", {}),
        (1, deep, "PNG", {}),
        (1, deep // 8, "TIFF", {}),
        (6, np.full((10, 8, 3), 7, np.uint8), "PNG", {}),
    ]
    for count, pixels, kind, more in pictures:
        for i in range(count):
            name = f"{'ab'[i % 2]}/{len(pixels)} {pixels.dtype} {pixels.ndim} {i}.{kind.lower()}"
            put(tmp_path / "src", name, content=encode(pixels, kind, **more))
    expected = {"turned": 5, "not turned": 4, "transparent": 3, "deep": 2, "dark": 1}
    expected |= {"enlarged": 6, "stored": 6 * 16 * 16 * 3, "own": 6 * 10 * 8 * 3 * 16 * 16 // (16 * 20)}
    options: dict[str, Any] = {"size": 16, "shard_size": 4096, "workers": 1}
    whole = convert(tmp_path / "src", tmp_path / "whole", **options)
    assert whole.facts == expected
    assert "4 pictures with an orientation that was not applied: see --exif-rotate" in whole.notes
    halves = [convert(tmp_path / "src", tmp_path / "parts", **options, part=(k, 2)) for k in (1, 2)]
    assert (halves[0].facts != expected, halves[1].facts, halves[1].notes) == (True, expected, whole.notes)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "src", tmp_path / "again", **options, on_progress=Interrupt(9))
    assert convert(tmp_path / "src", tmp_path / "again", **options).notes == whole.notes
    tried = estimate(tmp_path / "src", **options, seconds=30)
    assert tried.facts == expected
    assert any(note.endswith("(of 20 that were tried)") for note in tried.notes)


# --- the command line -------------------------------------------------------------------------------------------------


def test_the_command_line_says_what_is_missing_and_the_last_part_publishes(
    image_tree: Path, out: Path, finished: dict[str, str]
) -> None:
    first = shardio("convert", image_tree, out, *WORDS, "--part", "2/4")
    assert first.returncode == 0
    *_, last = first.stdout.splitlines()
    assert last == "part 2/4 done: 2 of 6 shards finished; the last part to finish publishes. Missing: 1, 3, 4"
    assert "digest" not in first.stdout
    again = shardio("convert", image_tree, out, *WORDS, "--part", "2/4")
    assert "nothing to do: this part is finished" in again.stdout
    for number in (1, 3):
        convert(image_tree, out, **OPTIONS, part=(number, 4))
    final = shardio("convert", image_tree, out, *WORDS, "--part", "4/4")
    assert "part 4/4" not in final.stdout
    assert ", digest " in final.stdout
    assert hashes(out) == finished


def test_parts_that_do_not_exist_are_wrong_usage() -> None:
    for part in ("3", "3/2", "a/b"):
        assert_one_clear_error(shardio("convert", "a", "b", "--part", part), 2, "K/N with K from 1 to N", part)
