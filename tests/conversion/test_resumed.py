"""A conversion that was stopped keeps its finished shards, makes the others again, and ends in the same bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conversions import OPTIONS, PER_SHARD, Interrupt, undisturbed
from folders import hashes

from shardio.conversion import task as shardtask
from shardio.conversion.convert import convert
from shardio.conversion.options import Progress
from shardio.conversion.report import ImagesBar


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def finished(image_tree: Path, tmp_path: Path) -> dict[str, str]:
    return undisturbed(image_tree, tmp_path / "undisturbed", **OPTIONS)


def test_an_interrupt_says_how_many_images_are_kept_and_the_next_call_begins_with_them(
    image_tree: Path, out: Path, finished: dict[str, str]
) -> None:
    for after, kept in ((2, "no image is kept yet"), (8, f"6 of 18 images are kept in {out}")):
        with pytest.raises(KeyboardInterrupt) as caught:
            convert(image_tree, out, **OPTIONS, on_progress=Interrupt(after))
        assert str(caught.value) == kept
    seen: list[Progress] = []
    assert convert(image_tree, out, **OPTIONS, on_progress=seen.append).num_converted == 12
    assert seen[0] == Progress(6, 0, 18, kept=6)
    assert seen[-1] == Progress(18, 0, 18, kept=6)
    assert hashes(out) == finished


@pytest.mark.parametrize("how", ["two threads", "processes", "parts"])
def test_any_way_of_resuming_gives_the_same_bytes(
    image_tree: Path, out: Path, finished: dict[str, str], how: str
) -> None:
    with pytest.raises(KeyboardInterrupt):
        convert(image_tree, out, **OPTIONS, on_progress=Interrupt(8))
    options = {name: value for name, value in OPTIONS.items() if name != "workers"}
    match how:
        case "two threads":
            reports = [convert(image_tree, out, **options, workers=2)]
        case "processes":
            reports = [convert(image_tree, out, **options, workers=5)]
        case _:
            reports = [convert(image_tree, out, **OPTIONS, part=(k, 2)) for k in (2, 1)]
    assert sum(report.num_converted for report in reports) == 12
    assert hashes(out) == finished


@pytest.mark.parametrize("shards", [1, 3, 6])
def test_a_shard_that_has_its_name_and_no_record_is_made_again(
    image_tree: Path, out: Path, finished: dict[str, str], shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: Any) -> None:
        calls.append(None)
        if len(calls) == shards:
            raise KeyboardInterrupt
        save(*arguments)

    calls: list[None] = []
    save = shardtask.save_record
    with monkeypatch.context() as patch:
        patch.setattr(shardtask, "save_record", killed)
        with pytest.raises(KeyboardInterrupt):
            convert(image_tree, out, **OPTIONS)
    assert len(list(out.glob("*-0*.npy"))) == shards
    assert convert(image_tree, out, **OPTIONS).num_converted == 18 - (shards - 1) * PER_SHARD
    assert hashes(out) == finished


def test_what_a_living_process_is_writing_is_left_to_it(image_tree: Path, out: Path, finished: dict[str, str]) -> None:
    reached, end = threading.Event(), threading.Event()

    def wait(progress: Progress) -> None:
        if progress.done == 8:
            reached.set()
            assert end.wait(60)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(convert, image_tree, out, **OPTIONS, on_progress=wait)
        assert reached.wait(60)
        (writing,) = out.glob(".train-00002.npy.*.tmp")
        with pytest.raises(KeyboardInterrupt):
            convert(image_tree, out, **OPTIONS, on_progress=Interrupt(7))
        assert writing.exists()
        end.set()
        assert first.result(60).num_converted == 18
    assert hashes(out) == finished


@pytest.fixture
def bar() -> Iterator[ImagesBar]:
    with ImagesBar() as bar:
        yield bar


def test_the_bar_says_what_was_kept_and_does_not_count_it_as_done_now(
    bar: ImagesBar, capsys: pytest.CaptureFixture[str]
) -> None:
    for done in (37_016, 37_116):
        bar.show(Progress(done, 0, 40_000, kept=37_016))
    assert (bar.n, bar.initial, bar.total) == (37_116, 37_016, 40_000)
    assert capsys.readouterr().err == "shardio: resuming: 37,016 of 40,000 samples were kept\n"
