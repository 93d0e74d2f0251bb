"""Conversions: the right samples, the same bytes whatever happened on the way, and clear refusals."""

from __future__ import annotations

import base64
import contextlib
import errno
import gc
import json
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import shutil
import signal
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversions import (
    OPTIONS,
    PER_SHARD,
    SIZE,
    TWO_PROCESSES,
    Interrupt,
    failing_storage,
    interrupted,
    rejects,
    undisturbed,
)
from deadlines import must_not_block
from disks import FailingDisk
from folders import everything, flip, hashes, stamps
from pictures import random_picture, write_jpeg
from PIL import Image
from storages import scan_tree

from shardio.conversion import claim
from shardio.conversion import task as shardtask
from shardio.conversion.convert import convert
from shardio.conversion.images.decode import decode_image
from shardio.conversion.images.fit import Fit
from shardio.conversion.options import ConvertOptions, Progress, count_bad
from shardio.conversion.plan import library_versions, order_sources
from shardio.conversion.records import Reject, read_rejects
from shardio.conversion.repair import repair
from shardio.conversion.report import show_progress
from shardio.errors import ConvertError, FormatError, ShardioError, SpaceError
from shardio.format.layout import crc32
from shardio.kernels.resample import to_yuv420
from shardio.reading.shardset import open_shards
from shardio.sets.verify import verify
from shardio.system.progress import Bar


def child_processes() -> set[int]:
    """Child processes, those included that have ended and were not waited for; without those that help all tests."""
    tracker = multiprocessing.resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    forks = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == os.getpid():
                found.add(int(entry))
    return found - {tracker, forks}


@pytest.fixture(autouse=True)
def no_child_left() -> Iterator[None]:
    before = child_processes()
    yield
    if any(name.startswith("sem.") for name in os.listdir("/dev/shm")):
        gc.collect()  # a pool's semaphores go with the frames of the exception that ended it
    assert child_processes() <= before
    assert not multiprocessing.active_children()


def assert_unfinished_and_whole(out: Path, finished: dict[str, str]) -> None:
    """No set, no temporary file, and every file that can be seen is the one of the finished set."""
    found = hashes(out)
    assert "manifest.json" not in found
    assert not [name for name in found if name.endswith(".tmp")], found
    visible = {name: digest for name, digest in found.items() if not name.startswith(".")}
    assert visible.items() <= finished.items()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Its name begins like that of `image_tree`, inside of which it is not."""
    return tmp_path / "images-out"


@pytest.fixture
def finished(image_tree: Path, tmp_path: Path) -> dict[str, str]:
    """The hashes of an undisturbed conversion of `image_tree` with OPTIONS."""
    found = undisturbed(image_tree, tmp_path / "undisturbed", **OPTIONS)
    assert len(found) == 4 + 2 + 2 + 1  # shards, indexes and manifest
    return found


# --- the same bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, None])
def test_any_number_of_workers_gives_the_same_bytes(
    image_tree: Path, out: Path, finished: dict[str, str], workers: int | None
) -> None:
    report = convert(image_tree, out, **{**OPTIONS, "workers": workers})
    assert hashes(out) == finished
    assert report.num_converted == report.num_sources == 18


def test_the_order_of_listing_and_the_place_of_the_tree_do_not_matter(
    image_tree: Path, out: Path, finished: dict[str, str], tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere" / "tree"
    for path in sorted(image_tree.rglob("*.JPEG"), reverse=True):  # made in another order, at other times
        target = moved / path.relative_to(image_tree)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        os.utime(target, (1, 1))
    convert(moved, out, **OPTIONS)
    assert hashes(out) == finished


def test_relative_paths_are_those_of_the_current_folder(
    image_tree: Path, out: Path, finished: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = convert("images", out.name, **OPTIONS)
    assert hashes(out) == finished
    assert report.out == str(out)


def test_worker_processes_of_a_conversion_in_another_thread_give_the_same_bytes(
    image_tree: Path, out: Path, finished: dict[str, str]
) -> None:
    processes: list[int] = []

    def look(progress: Progress) -> None:
        processes.append(len(multiprocessing.active_children()))

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(convert, image_tree, out, **{**OPTIONS, "workers": TWO_PROCESSES}, on_progress=look)
        assert future.result(60).num_converted == 18
    assert max(processes) == 2
    assert hashes(out) == finished


# --- the right samples ------------------------------------------------------------------------------------------------


def check_samples(src: Path, out: Path, fit: Fit, order: str = "shuffled") -> int:
    """Compares all samples with the decoder and resizer, called by hand in the order of the plan. Returns the count."""
    tree = scan_tree(src)
    total = 0
    for split, listed in tree.splits.items():
        sources = order_sources(listed, ConvertOptions(order=order))  # type: ignore[arg-type]
        shards = [np.load(path) for path in sorted(out.glob(f"{split}-[0-9]*.npy"))]
        index = np.load(out / f"{split}-index.npy")
        position = 0
        pixels = np.concatenate(shards)
        for source in sources:
            if position < len(index) and index["key"][position] == source.key:
                data, colors = (src / os.fsdecode(source.key)).read_bytes(), fit.background
                decoded = decode_image(data, exif_rotate=fit.exif_rotate, background=colors).pixels
                np.testing.assert_array_equal(pixels[position], fit.apply(decoded), err_msg=str(source.key))
                row = index[position]
                assert row["label"] == source.label == sorted(tree.classes).index(source.key.split(b"/")[-2].decode())
                assert (row["source_height"], row["source_width"]) == decoded.shape[:2]
                assert row["crc32"] == zlib.crc32(pixels[position].tobytes())
                position += 1
        assert position == len(index) == len(pixels), f"{split}: the samples are not in the order of the plan"
        opened = open_shards(out, split)
        assert len(opened) == position
        assert opened.classes == tree.classes
        total += position
    return total


@pytest.mark.parametrize(
    ("size", "fit", "order", "resample"),
    [
        (16, "crop", "shuffled", "bicubic"),
        ((12, 20), "squash", "source", "bilinear"),
        ((20, 12), "pad", "shuffled", "lanczos"),
    ],
)
def test_samples_are_the_decoded_and_resized_sources(
    image_tree: Path, out: Path, size: int | tuple[int, int], fit: Any, order: str, resample: Any
) -> None:
    options = {**OPTIONS, "size": size, "fit": fit, "order": order, "resample": resample}
    report = convert(image_tree, out, **options)
    target = (size, size) if isinstance(size, int) else size
    assert check_samples(image_tree, out, Fit(target, fit, resample), order) == 18
    assert dict(report.num_samples) == {"train": 12, "val": 6}
    assert verify(out).ok


def test_fast_reduces_what_is_large_and_keeps_the_sizes_of_the_sources(image_tree: Path, tmp_path: Path) -> None:
    options = {**OPTIONS, "size": 8, "order": "source"}
    for quality in ("exact", "fast"):
        convert(image_tree, tmp_path / quality, **{**options, "quality": quality})
        assert verify(tmp_path / quality).ok
    exact, fast = open_shards(tmp_path / "exact"), open_shards(tmp_path / "fast")
    for name in ("key", "label", "source_width", "source_height"):
        np.testing.assert_array_equal(exact.index[name], fast.index[name])
    reduced = 0
    for row, before, after in zip(exact.index, exact, fast, strict=True):
        place = Fit((8, 8)).placement(int(row["source_height"]), int(row["source_width"]))
        if min(row["source_height"] / place.resized[0], row["source_width"] / place.resized[1]) >= 4:
            reduced += 1
            difference = np.abs(before.image.astype(int) - after.image)
            assert 0 < difference.mean() < 4
        else:
            np.testing.assert_array_equal(before.image, after.image)
    assert 3 <= reduced <= 9


def test_pictures_are_turned_and_laid_over_a_background_where_that_is_asked_for(tmp_path: Path, out: Path) -> None:
    rng = np.random.default_rng(9)
    folder = tmp_path / "src" / "a"
    folder.mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(random_picture(rng, 30, 50)).save(folder / "turned.jpg", exif=exif)
    rgba = np.dstack([random_picture(rng, 20, 20), np.zeros((20, 20), np.uint8)])
    Image.fromarray(rgba).save(folder / "transparent.png")
    fit = Fit((SIZE, SIZE), exif_rotate=True, background=(0, 128, 0))
    options = {**OPTIONS, "exif_rotate": True, "background": "green", "labels": "folders", "order": "source"}
    convert(tmp_path / "src", out, **options)
    assert check_samples(tmp_path / "src", out, fit, "source") == 2
    transparent, _ = open_shards(out)
    assert (transparent.image == (0, 128, 0)).all()
    assert open_shards(out).index["source_height"].tolist() == [20, 50]


def test_names_that_are_no_utf8_or_need_quoting_are_kept(tmp_path: Path, out: Path) -> None:
    picture = random_picture(np.random.default_rng(6), 20, 20)
    names = [b"\xff\xfe", b"new\nline", b'quo"te', b"sp ace", "é☃".encode()]
    for name in names:
        write_jpeg(tmp_path / "src" / os.fsdecode(b"class " + name) / os.fsdecode(name + b".jpg"), picture)
        (tmp_path / "src" / os.fsdecode(b"class " + name) / os.fsdecode(b"bad " + name)).write_bytes(b"\xff\xd8\xff")
    report = convert(tmp_path / "src", out, **{**OPTIONS, "max_bad": 5})
    assert verify(out).ok
    shards = open_shards(out)
    assert sorted(shards.index["key"].tolist()) == sorted(b"class %s/%s.jpg" % (n, n) for n in names)
    assert sorted(os.fsencode(name) for name in shards.classes) == sorted(b"class " + n for n in names)
    assert {os.fsencode(line["key"]) for line in rejects(out)} == {b"class %s/bad %s" % (n, n) for n in names}
    assert report.refused == {"damaged": 5}


# --- refused images ---------------------------------------------------------------------------------------------------


def damage(tree: Path, *names: str) -> None:
    for name in names:
        (tree / name).write_bytes(b"")


BAD: dict[str, tuple[str, str]] = {
    "train/n01/empty.JPEG": ("empty", "the file has no bytes"),
    "train/n02/page.JPEG": ("unsupported", "found text"),
    "train/n02/cut.JPEG": ("damaged", ""),
    "train/n03/gone.JPEG": ("unreadable", "No such file or directory"),
    "train/n03/long.png": ("too large", "20000 x 1 resized: expected at most"),
    "val/n01/bytes.JPEG": ("unsupported", "found something else"),
}


def add_bad_images(tree: Path) -> None:
    (tree / "train/n01/empty.JPEG").write_bytes(b"")
    (tree / "train/n02/page.JPEG").write_bytes(b"<html>404</html>")
    whole = (tree / "train/n02/n02_0.JPEG").read_bytes()
    (tree / "train/n02/cut.JPEG").write_bytes(whole[: len(whole) // 2])
    (tree / "train/n03/gone.JPEG").symlink_to("nowhere.JPEG")
    Image.new("RGB", (20_000, 1)).save(tree / "train/n03/long.png")
    (tree / "val/n01/bytes.JPEG").write_bytes(bytes(range(100)))


def test_refused_images_are_left_out_listed_and_counted(image_tree: Path, out: Path) -> None:
    add_bad_images(image_tree)
    # 512 x 20,000 x 512 pixels would be too many: the long picture is one only at a larger size.
    report = convert(image_tree, out, **{**OPTIONS, "size": 512, "shard_size": 1 << 22, "max_bad": 6, "workers": 2})
    listed = {line["key"]: line for line in rejects(out)}
    assert set(listed) == set(BAD)
    for name, (reason, detail) in BAD.items():
        line = listed[name]
        assert set(line) == {"split", "key", "reason", "detail"}
        assert line["split"] == name.split("/")[0]
        assert line["reason"] == reason, name
        assert detail in line["detail"], name
        assert line["detail"]
    assert report.refused == Counter(reason for reason, _ in BAD.values())
    assert sum(report.refused.values()) == 6
    assert dict(report.num_samples) == {"train": 12, "val": 6}
    assert check_samples(image_tree, out, Fit((512, 512))) == 18
    assert verify(out).ok


def test_mended_images_are_taken_and_told(image_tree: Path, out: Path, finished: dict[str, str]) -> None:
    path = image_tree / "train" / "n02" / "n02_1.JPEG"
    data = path.read_bytes()
    tables = data.index(b"\xff\xdb")
    path.write_bytes(data[:tables] + b"junk" + data[tables:])
    report = convert(image_tree, out, **{**OPTIONS, "max_bad": 0})
    assert [(m.split, m.key) for m in report.mended] == [("train", b"train/n02/n02_1.JPEG")]
    assert "junk in the header left out" in report.mended[0].warning
    assert hashes(out) == finished  # the pixels are the same


def test_what_is_ignored_is_counted(image_tree: Path, out: Path, finished: dict[str, str]) -> None:
    (image_tree / "train" / "n01" / "._n01_0.JPEG").write_bytes(b"x")
    (image_tree / "README").write_bytes(b"x")
    os.mkfifo(image_tree / "val" / "n01" / "fifo")
    report = convert(image_tree, out, **OPTIONS)
    assert report.ignored == {"hidden": 1, "not an image": 1, "not a regular file": 1}
    assert hashes(out) == finished


def test_a_limit_is_a_count_or_a_share() -> None:
    assert [count_bad(percent / 100, 100) for percent in range(101)] == list(range(101))  # 0.29 * 100 < 29
    assert [count_bad(limit, 18) for limit in (0, 3, 0.0, 0.06, 1 / 6, 0.5)] == [0, 3, 0, 1, 3, 9]


@pytest.mark.parametrize(("max_bad", "bad"), [(0, 0), (3, 3), (0.06, 1)])
def test_exactly_as_many_refused_images_as_allowed_pass(
    image_tree: Path, tmp_path: Path, max_bad: int | float, bad: int
) -> None:
    names = sorted(str(path.relative_to(image_tree)) for path in image_tree.rglob("*_0.JPEG"))
    names += sorted(str(path.relative_to(image_tree)) for path in image_tree.rglob("*_1.JPEG"))
    damage(image_tree, *names[:bad])
    report = convert(image_tree, tmp_path / "pass", **OPTIONS, max_bad=max_bad)
    assert sum(report.refused.values()) == bad
    damage(image_tree, names[bad])
    with pytest.raises(ConvertError, match=f"expected at most {bad} refused images of 18, found {bad + 1} after"):
        convert(image_tree, tmp_path / "fail", **OPTIONS, max_bad=max_bad)
    assert not (tmp_path / "fail" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_bad": -1}, "max_bad must be a count such as 10, or a share from 0.0 to 1.0, such as 0.01; found -1"),
        ({"max_bad": 1.5}, "max_bad must be a count such as 10, or a share .*; found 1.5"),
        ({"max_bad": -0.1}, "max_bad must be a count such as 10, or a share .*; found -0.1"),
        ({"max_bad": float("nan")}, "max_bad must be a count such as 10, or a share .*; found nan"),
        ({"max_bad": "1%"}, "max_bad must be a count such as 10, or a share .*; found '1%'"),
        ({"max_bad": None}, "max_bad must be a count such as 10, or a share .*; found None"),
        ({"size": "256"}, "size must be .*; found '256'"),
        ({"shard_size": "4GiB"}, "shard_size must be a positive integer, in bytes; found '4GiB'"),
        ({"shard_size": 4e9}, "shard_size must be a positive integer, in bytes; found 4000000000.0"),
        ({"seed": "1"}, "seed must be an integer from 0 to .*; found '1'"),
        *(
            ({"part": part}, r"part must be \(K, N\) with K from 1 to N; found \(.*\)")
            for part in ((3, 2), (0, 4), (1, 0), (-1, 4), (1.0, 4), (1, "4"), (True, 4))
        ),
        ({"workers": "2"}, "workers must be an integer, at least 1, or None for all cores; found '2'"),
        ({"workers": 1.5}, "workers must be an integer, .*; found 1.5"),
        ({"workers": 0}, "workers must be an integer, at least 1, .*; found 0"),
        ({"workers": -2}, "workers must be an integer, at least 1, .*; found -2"),
        ({"size": 0}, r"size must be \(height, width\), each from 1 to 65536; found \(0, 0\)"),
        ({"size": (4, 5, 6)}, r"size must be \(height, width\), .* found \(4, 5, 6\)"),
        ({"fit": "stretch"}, "fit must be one of crop, squash, pad, adm; found 'stretch'"),
        ({"resample": "box"}, "resample must be one of bicubic, bilinear, lanczos; found 'box'"),
        ({"order": "random"}, "order must be one of shuffled, source; found 'random'"),
        ({"shard_size": 0}, "shard_size must be a positive integer, in bytes; found 0"),
        ({"background": (1, 2)}, r"background must be \(red, green, blue\), each from 0 to 255; found \(1, 2\)"),
        ({"background": "dull"}, "expected a color such as 255,255,255, #ffffff or white; found 'dull'"),
        ({"exif_rotate": 1}, "exif_rotate must be True or False; found 1"),
        *(({"seed": n}, rf"seed must be an integer from 0 to 2\*\*64 - 1; found {n}") for n in (-1, 1 << 64)),
        ({"quality": "good"}, "quality must be one of exact, fast; found 'good'"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_src_is_scanned(
    out: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        convert("no images", out, **{**OPTIONS, **options})
    assert not out.exists()


def bad_in_two_shards(image_tree: Path) -> tuple[list[str], Path]:
    """Two sources, in the first and in the last shard of "source" order, made bad; and a sound copy of the tree."""
    sound = image_tree.with_name("sound")
    shutil.copytree(image_tree, sound)
    names = ["train/n01/n01_1.JPEG", "val/n03/n03_1.JPEG"]
    damage(image_tree, *names)
    return names, sound


def test_past_the_limit_nothing_is_published_and_mending_redoes_only_the_shards_concerned(
    image_tree: Path, out: Path, tmp_path: Path
) -> None:
    names, sound = bad_in_two_shards(image_tree)
    options = {**OPTIONS, "order": "source", "max_bad": 1}
    convert(sound, tmp_path / "reference", **options)
    with pytest.raises(ConvertError) as caught:
        convert(image_tree, out, **options)
    message = str(caught.value)
    assert message.startswith(
        f"{out}: expected at most 1 refused images of 18, found 2 after 18 images; nothing is published."
    )
    assert (
        f"{out / 'rejects.jsonl'} lists the refused images: mend" in message
    )  # to remove them makes another conversion
    assert not (out / "manifest.json").exists()
    assert [(line["key"], line["reason"]) for line in rejects(out)] == [(name, "empty") for name in names]
    before = stamps(out)
    assert set(before) == {*(f"train-0000{number}.npy" for number in range(4)), "val-00000.npy", "val-00001.npy"}

    for name in names:
        shutil.copyfile(sound / name, image_tree / name)
    report = convert(image_tree, out, **options)
    assert report.num_converted == 6
    assert sum(report.refused.values()) == 0
    after = stamps(out)
    assert {name for name in before if after[name] != before[name]} == {"train-00000.npy", "val-00001.npy"}
    assert hashes(out) == hashes(tmp_path / "reference")


def test_allowing_more_publishes_without_doing_finished_shards_again(image_tree: Path, out: Path) -> None:
    names, _ = bad_in_two_shards(image_tree)
    options = {**OPTIONS, "order": "source"}
    for _ in range(2):
        with pytest.raises(ConvertError, match="expected at most 1 refused images of 18, found 2 after 18"):
            convert(image_tree, out, **options, max_bad=1)
        assert [line["key"] for line in rejects(out)] == names
    before = stamps(out)
    report = convert(image_tree, out, **options, max_bad=2)
    assert (report.num_converted, report.refused) == (0, {"empty": 2})
    assert str(report).startswith("published: other calls converted all images\n")
    assert convert(image_tree, out, **options, max_bad=2).published_before
    assert [line["key"] for line in rejects(out)] == names
    assert {name: stamp for name, stamp in stamps(out).items() if name in before} == before
    assert check_samples(image_tree, out, Fit((SIZE, SIZE)), "source") == 16


def test_all_refused_images_of_a_small_collection_are_named_at_once(image_tree: Path, out: Path) -> None:
    names = sorted(str(path.relative_to(image_tree)) for path in image_tree.rglob("*_1.JPEG"))
    damage(image_tree, *names)
    with pytest.raises(ConvertError, match="found 6 after 18") as caught:
        convert(image_tree, out, **OPTIONS, max_bad=0)
    assert sorted(line["key"] for line in rejects(out)) == names
    named = str(caught.value).splitlines()[1:]
    assert sorted(line.split(":")[0].strip() for line in named) == names
    assert all(": empty: " in line for line in named)


@pytest.mark.parametrize(("limit", "most"), [("_MOST_REFUSED", 4), ("_MOST_DONE", 5)])
def test_a_large_collection_is_not_converted_to_its_end_for_nothing(
    limit: str, most: int, image_tree: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(image_tree, *(str(path.relative_to(image_tree)) for path in image_tree.rglob("*.JPEG")))
    monkeypatch.setattr(f"shardio.conversion.report.{limit}", most)
    with pytest.raises(ConvertError, match=f"found {most} after {most} images;"):
        convert(image_tree, out, **{**OPTIONS, "workers": 1}, max_bad=0)


def test_a_shard_of_refused_images_only_leaves_a_gap_and_no_file(image_tree: Path, out: Path) -> None:
    damage(image_tree, *(f"train/n01/n01_{i}.JPEG" for i in range(3)))
    report = convert(image_tree, out, **OPTIONS, order="source", max_bad=3)
    assert report.num_shards == 5
    assert not (out / "train-00000.npy").exists()
    assert verify(out).ok
    assert check_samples(image_tree, out, Fit((SIZE, SIZE)), "source") == 15


def test_a_split_of_refused_images_only_is_not_published(image_tree: Path, out: Path) -> None:
    damage(image_tree, *(str(path.relative_to(image_tree)) for path in image_tree.glob("val/*/*")))
    with pytest.raises(ConvertError, match="split 'val': every image was refused") as caught:
        convert(image_tree, out, **OPTIONS, max_bad=1.0)
    assert str(caught.value).startswith(f"{out}: ")
    assert not (out / "manifest.json").exists()


def test_a_shard_of_refused_images_only_is_left_out_of_a_set_without_labels(tmp_path: Path, out: Path) -> None:
    for number in range(6):
        write_jpeg(tmp_path / "src" / f"{number}.jpg", random_picture(np.random.default_rng(number), 16, 16))
    for number in range(2, 4):
        (tmp_path / "src" / f"{number}.jpg").write_bytes(b"\xff\xd8\xff")
    two = {"size": 16, "shard_size": 4096 + 2 * 16 * 16 * 3, "order": "source"}
    assert convert(tmp_path / "src", out, **two, max_bad=2).num_samples == {"train": 4}
    assert verify(out).ok


# --- the same call again, and other calls -----------------------------------------------------------------------------


def test_the_same_call_again_does_nothing(image_tree: Path, out: Path) -> None:
    first = convert(image_tree, out, **OPTIONS)
    before = everything(out)

    def never(progress: Progress) -> None:
        raise AssertionError(f"worked on {progress}")

    for workers in (1, 7):
        again = convert(image_tree, out, **{**OPTIONS, "workers": workers}, on_progress=never)
        assert again.num_converted == 0
        assert (again.digest, again.num_samples, again.nbytes) == (first.digest, first.num_samples, first.nbytes)
    assert everything(out) == before


def test_rows_of_yuv420_are_made_from_the_pixels_of_a_plain_set(image_tree: Path, out: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    convert(image_tree, out, **OPTIONS)
    convert(image_tree, half, **OPTIONS, pixels="yuv420")
    plain, halved = open_shards(out), open_shards(half)
    rows = np.concatenate([np.load(half / entry.file) for entry in halved.content.shards])
    assert rows.shape == (len(plain), SIZE * 3 // 2, SIZE)
    expected = np.empty_like(rows)
    to_yuv420(np.stack([sample.image for sample in plain]), expected)
    np.testing.assert_array_equal(rows, expected)
    assert [crc32(row) for row in rows] == halved.index["crc32"].tolist()
    assert plain.index[["label", "key"]].tolist() == halved.index[["label", "key"]].tolist()
    assert verify(half).ok
    seen = np.stack([sample.image for sample in halved]).reshape(-1, 3) / 255
    np.testing.assert_allclose(halved.manifest.provenance["pixels"]["mean"], seen.mean(axis=0), atol=1e-6)
    before = hashes(half)
    (half / halved.content.shards[0].file).unlink()
    assert repair(half, image_tree).repaired == (halved.content.shards[0].file,)
    assert hashes(half) == before


@pytest.mark.parametrize("state", ["finished set", "unfinished conversion"])
def test_another_conversion_into_the_folder_is_refused_and_the_difference_named(
    image_tree: Path, out: Path, state: str
) -> None:
    if state == "finished set":
        convert(image_tree, out, **OPTIONS)
    else:
        interrupted(image_tree, out, 10)
    before = everything(out)
    with pytest.raises(ConvertError, match=rf"holds an? {state} (of another|with other)") as caught:
        convert(image_tree, out, **{**OPTIONS, "seed": 3})
    message = str(caught.value)
    assert message.startswith(f"{out}: ")
    assert "(seed 0, here 3)" in message
    with pytest.raises(ConvertError, match="pixels 'rgb', here 'yuv420'"):
        convert(image_tree, out, **OPTIONS, pixels="yuv420")
    assert everything(out) == before
    convert(image_tree, out, **OPTIONS)


def test_other_versions_of_libraries_do_not_go_on_with_unfinished_work(
    image_tree: Path, out: Path, finished: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(image_tree, out, 10)
    before = everything(out)
    newer = {**library_versions(), "pillow": "99.0"}
    with monkeypatch.context() as patch:
        patch.setattr(claim, "library_versions", lambda: newer)
        with pytest.raises(ConvertError, match="holds an unfinished conversion with other options") as caught:
            convert(image_tree, out, **OPTIONS)
        assert str(caught.value).startswith(f"{out}: ")
        assert "'pillow': '99.0'" in str(caught.value)
        assert everything(out) == before
    convert(image_tree, out, **OPTIONS)
    assert hashes(out) == finished


def test_a_finished_set_is_finished_for_other_versions_of_libraries_too(
    image_tree: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(image_tree, out, **OPTIONS)
    monkeypatch.setattr(claim, "library_versions", lambda: {"pillow": "99.0"})
    assert convert(image_tree, out, **OPTIONS).num_converted == 0


def test_one_folder_inside_the_other_is_refused(image_tree: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(image_tree)
    before = everything(tmp_path)
    for src, out in (
        (image_tree, image_tree),
        (image_tree, image_tree / "out"),
        (image_tree, image_tree / "train" / "n01"),
        (image_tree, tmp_path),
        (image_tree, tmp_path / "link" / "out"),
        (tmp_path / "link", image_tree / "out"),
        (image_tree, tmp_path / "x" / ".." / "images" / "out"),
    ):
        with pytest.raises(ConvertError, match="found one inside the other") as caught:
            convert(src, out, **OPTIONS)
        assert str(caught.value).startswith(f"{os.path.abspath(out)}: expected a folder apart from ")
        assert everything(tmp_path) == before


def test_a_file_in_place_of_the_folder_is_refused(image_tree: Path, out: Path) -> None:
    out.write_text("mine")
    dangling = out.with_name("dangling")
    dangling.symlink_to("nowhere")
    for path, found in ((out, "file"), (dangling, "symbolic link")):
        with pytest.raises(ConvertError, match=found) as caught:
            convert(image_tree, path, **OPTIONS)
        assert str(caught.value).startswith(f"{path}: ")
    assert out.read_text() == "mine"


@pytest.mark.parametrize("name", ["notes.txt", "folder/", ".hidden", "train-00000.npy", "rejects.jsonl"])
def test_a_folder_with_foreign_files_is_refused_and_left_alone(image_tree: Path, out: Path, name: str) -> None:
    out.mkdir()
    if name.endswith("/"):
        (out / name).mkdir()
    else:
        (out / name).write_text("mine")
    before = everything(out)
    with pytest.raises(ConvertError, match="expected no folder, an empty one or an unfinished conversion") as caught:
        convert(image_tree, out, **OPTIONS)
    assert str(caught.value).startswith(f"{out}: ")
    assert f"found {name.rstrip('/')!r} in it. Convert into a new folder" in str(caught.value)
    assert everything(out) == before


def test_a_set_that_convert_did_not_make_is_refused(image_tree: Path, make_set: Callable[..., Path]) -> None:
    folder = make_set(20)
    before = everything(folder)
    with pytest.raises(ConvertError, match="holds a published set that `convert` did not make") as caught:
        convert(image_tree, folder, **OPTIONS)
    assert str(caught.value).startswith(f"{folder}: ")
    assert everything(folder) == before


# --- room -------------------------------------------------------------------------------------------------------------


def test_too_little_space_is_told_before_anything_is_written(
    image_tree: Path, out: Path, finished: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 6 * 4096 + 18 * SIZE * SIZE * 3
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, needed - 1))
        with pytest.raises(SpaceError, match=f"expected room for {needed:,} more bytes") as caught:
            convert(image_tree, out, **OPTIONS)
        assert str(caught.value).startswith(f"{out}: ")
        assert f"found {needed - 1:,} bytes free" in str(caught.value)
        assert not out.exists()
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
        convert(image_tree, out, **OPTIONS)
    assert hashes(out) == finished


def test_finished_shards_need_no_room_again(
    image_tree: Path, out: Path, finished: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(image_tree, out, 10)  # three shards are done
    left = 3 * (4096 + PER_SHARD * SIZE * SIZE * 3)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, left))
    convert(image_tree, out, **OPTIONS)
    assert hashes(out) == finished


@pytest.fixture
def small_tree(tmp_path: Path) -> Path:
    """Four images, one of them bad; with SMALL, two shards of two."""
    rng = np.random.default_rng(7)
    root = tmp_path / "small"
    for name in ("train/a/1.jpg", "train/a/2.jpg", "train/b/3.jpg"):
        write_jpeg(root / name, random_picture(rng, 16, 20))
    (root / "train" / "b" / "bad.jpg").write_bytes(b"")
    return root


DISK_WRITES = ("write", "pwrite", "ftruncate", "posix_fallocate", "fsync", "fdatasync", "link")
SMALL: dict[str, Any] = {"size": 8, "shard_size": 4096 + 2 * 192, "workers": 1, "max_bad": 1}


def convert_failing(disk: FailingDisk, src: Path, out: Path) -> OSError | ConvertError | None:
    with disk.installed():
        try:
            convert(src, out, **SMALL)
        except (OSError, ConvertError) as error:
            return error
    return None


def test_a_disk_that_fails_at_any_call_loses_nothing(
    small_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Calls that read are left out: a source that cannot be opened is a refused image, which other tests are about.
    monkeypatch.setattr("disks.DISK_CALLS", DISK_WRITES)
    reference = tmp_path / "reference"
    counting = FailingDisk(0, errno.EIO, for_good=False)
    assert convert_failing(counting, small_tree, reference) is None
    expected = hashes(reference)
    assert counting.num_calls > 40
    unclear = []
    for first in range(1, counting.num_calls + 1):
        code = errno.ENOSPC if first % 3 else errno.EIO
        disk = FailingDisk(first, code, for_good=first % 2 == 0)
        out = tmp_path / f"out-{first}"
        error = convert_failing(disk, small_tree, out)
        assert disk.failed, first
        if (out / "manifest.json").exists():
            # Only calls after the manifest's own rename may fail with the set there.
            assert hashes(out).items() >= expected.items(), disk
            assert verify(out).ok, disk
        else:
            assert error is not None, f"the failure went unnoticed: {disk}"
            assert_unfinished_and_whole(out, expected)
            if str(tmp_path) not in str(error) or (code == errno.ENOSPC and "make room" not in str(error)):
                unclear.append(f"{disk}: {error!r}")
        convert(small_tree, out, **SMALL)
        assert hashes(out) == expected, disk
    assert not unclear, "errors that do not name the file or the way out:\n" + "\n".join(unclear)


# --- going on ---------------------------------------------------------------------------------------------------------


def test_an_interrupt_at_any_image_leaves_no_trace_and_the_same_call_goes_on(
    image_tree: Path, tmp_path: Path, finished: dict[str, str]
) -> None:
    for after in (1, 3, 4, 11, 18):
        out = tmp_path / f"out-{after}"
        interrupted(image_tree, out, after, workers=1 + after % 2)
        assert_unfinished_and_whole(out, finished)
        assert len(stamps(out)) == (after - 1) // PER_SHARD
        report = convert(image_tree, out, **OPTIONS)
        assert report.num_converted == 18 - (after - 1) // PER_SHARD * PER_SHARD
        assert hashes(out) == finished, after


def test_a_shard_whose_source_changed_since_is_done_again(image_tree: Path, out: Path, tmp_path: Path) -> None:
    options = {**OPTIONS, "order": "source"}
    interrupted(image_tree, out, 18, order="source")
    before = stamps(out)
    assert len(before) == 5
    changed = image_tree / "train" / "n02" / "n02_0.JPEG"  # the fifth: in the second shard
    write_jpeg(changed, random_picture(np.random.default_rng(99), 50, 50))
    report = convert(image_tree, out, **options)
    after = stamps(out)
    assert {name for name in before if after[name] != before[name]} == {"train-00001.npy"}
    assert report.num_converted == 6
    convert(image_tree, tmp_path / "reference", **options)
    assert hashes(out) == hashes(tmp_path / "reference")


@pytest.mark.parametrize(
    "spoil",
    [
        *("record lost", "record cut", "record of nonsense", "record of another label"),
        *("shard lost", "shard cut", "shard of another bit"),
    ],
)
def test_a_shard_without_a_sound_record_is_done_again(
    image_tree: Path, out: Path, finished: dict[str, str], spoil: str
) -> None:
    interrupted(image_tree, out, 18)
    shard, record = out / "train-00001.npy", out / ".convert" / "train-00001.npy.json"
    match spoil:
        case "record lost":
            record.unlink()
        case "record cut":
            record.write_bytes(record.read_bytes()[:-30])
        case "record of nonsense":
            record.write_bytes(b'{"entry": [1, 2]}')
        case "record of another label":
            fields = json.loads(record.read_bytes())
            rows = bytearray(base64.b64decode(fields["rows"]))
            rows[0] ^= 1
            record.write_text(json.dumps({**fields, "rows": base64.b64encode(rows).decode()}))
        case "shard lost":
            shard.unlink()
        case "shard of another bit":
            flip(shard)
        case _:
            os.truncate(shard, shard.stat().st_size - 1)
    assert convert(image_tree, out, **OPTIONS).num_converted == 6
    assert hashes(out) == finished


def test_sources_that_could_not_be_read_are_tried_again(image_tree: Path, out: Path, finished: dict[str, str]) -> None:
    broken = "train/n02/n02_1.JPEG"
    with failing_storage(broken):
        interrupted(image_tree, out, 18, max_bad=1)  # all shards but the last are finished
    assert broken in "".join(path.read_text() for path in (out / ".convert").glob("*.refused.jsonl"))
    assert convert(image_tree, out, **OPTIONS).num_converted == 2 * PER_SHARD
    assert hashes(out) == finished


@pytest.mark.parametrize("is_finished", [False, True])
def test_what_killed_processes_left_is_swept(
    image_tree: Path, out: Path, finished: dict[str, str], is_finished: bool
) -> None:
    if is_finished:
        convert(image_tree, out, **OPTIONS)
        (out / ".convert").mkdir()
        (out / ".convert" / "train-00000.npy.refused.jsonl").write_bytes(b"")
    out.mkdir(exist_ok=True)
    (out / ".train-00000.npy.0123456789abcdef.tmp").write_bytes(b"half")
    assert convert(image_tree, out, **OPTIONS).num_converted == (0 if is_finished else 18)
    assert hashes(out) == finished
    assert not (out / ".convert").exists()


def meanwhile(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Runs `do` when the next conversion has found its folder empty, before it claims it."""
    real = claim.make_folder

    def after_the_other(folder: Path) -> None:
        monkeypatch.setattr(claim, "make_folder", real)
        do()
        real(folder)

    monkeypatch.setattr(claim, "make_folder", after_the_other)


def test_a_conversion_that_comes_too_late_for_a_folder_leaves_nothing_there(
    image_tree: Path, out: Path, finished: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(monkeypatch, lambda: convert(image_tree, out, **OPTIONS))
    with pytest.raises(ConvertError, match="holds a finished set of another conversion"):
        convert(image_tree, out, **{**OPTIONS, "seed": 7})
    assert hashes(out) == finished
    assert not (out / ".convert").exists()


def test_the_plan_of_a_conversion_that_came_too_late_does_not_keep_others_from_the_set(
    image_tree: Path, out: Path, finished: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def do() -> None:
        convert(image_tree, out, **OPTIONS)
        (out / ".convert").mkdir()
        (out / ".convert" / "plan.json").write_text('{"seed": 7}')

    meanwhile(monkeypatch, do)
    assert convert(image_tree, out, **OPTIONS).num_converted == 0
    assert hashes(out) == finished
    assert not (out / ".convert").exists()


def test_an_orphan_that_still_writes_while_the_work_folder_is_removed_leaves_nothing(
    image_tree: Path, out: Path, finished: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A worker whose parent was killed notices it after its first image, and opens its list of refused images before.
    rmdir = os.rmdir
    written: list[str] = []

    def after_the_orphan(path: str, **options: Any) -> None:
        if not written:
            with contextlib.suppress(FileNotFoundError):
                (out / ".convert" / "train-00001.npy.refused.jsonl").write_bytes(b"")
            written.append(path)
        rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", after_the_orphan)
    convert(image_tree, out, **OPTIONS)
    assert written
    assert hashes(out) == finished
    assert not (out / ".convert").exists()


def test_an_interrupt_says_how_many_images_are_kept_and_the_next_call_begins_with_them(
    image_tree: Path, out: Path, finished: dict[str, str]
) -> None:
    for after, kept in ((2, "no image is kept yet"), (8, f"6 of 18 images are kept in {out}")):
        with pytest.raises(KeyboardInterrupt) as caught:
            convert(image_tree, out, **OPTIONS, on_progress=Interrupt(after))
        assert str(caught.value) == kept
    seen: list[Progress] = []
    options = {**OPTIONS, "workers": TWO_PROCESSES}
    assert convert(image_tree, out, **options, on_progress=seen.append).num_converted == 12
    assert seen[0] == Progress(6, 0, 18, kept=6)
    assert seen[-1] == Progress(18, 0, 18, kept=6)
    assert hashes(out) == finished


@pytest.mark.parametrize("shards", [1, 6])
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


def test_the_bar_says_what_was_kept_and_does_not_count_it_as_done_now(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar() as bar:
        for done in (37_016, 37_116):
            show_progress(bar, Progress(done, 0, 40_000, kept=37_016))
        assert (bar.n, bar.initial, bar.total) == (37_116, 37_016, 40_000)
        assert capsys.readouterr().err == "shardio: resuming: 37,016 of 40,000 samples were kept\n"


# --- worker processes -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """90 images in one split: enough that worker processes are busy when they are disturbed. And their set's hashes."""
    rng, folder = np.random.default_rng(8), tmp_path_factory.mktemp("larger")
    for i in range(90):
        write_jpeg(folder / "images" / f"n{i % 4}" / f"{i}.JPEG", random_picture(rng, 160, 200))
    convert(folder / "images", folder / "reference", **OPTIONS)
    return folder / "images", hashes(folder / "reference")


def test_a_worker_process_that_is_killed_costs_nothing_but_time(larger: tuple[Path, dict[str, str]], out: Path) -> None:
    src, finished = larger
    killed: list[int] = []

    def kill(progress: Progress) -> None:
        if progress.done >= 3 * PER_SHARD and not killed:
            victim = multiprocessing.active_children()[0]
            killed.append(victim.pid or 0)
            os.kill(killed[0], signal.SIGKILL)

    report = convert(src, out, **{**OPTIONS, "workers": TWO_PROCESSES}, on_progress=kill)
    assert killed
    assert report.num_converted == 90
    assert hashes(out) == finished


class Bombs:
    """Images that have the process killed that reads one of the `bombs`, if it is not the process that made this."""

    def __init__(self, bombs: set[int]) -> None:
        self.bombs, self.maker = bombs, os.getpid()

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> Any:
        if number in self.bombs and os.getpid() != self.maker:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full((16, 16, 3), number, np.uint8), 0


def test_an_image_at_which_the_kernel_kills_a_process_that_is_alone_twice_is_refused(out: Path) -> None:
    report = convert(Bombs({0, 5, 6, 19}), out, **{**OPTIONS, "workers": 2, "max_bad": 4})
    assert report.refused == {"too large": 4}
    assert sum(report.num_samples.values()) == 16
    assert all("bytes of memory" in one["detail"] for one in rejects(out))


def test_ctrl_c_with_worker_processes_leaves_no_trace_and_the_same_call_goes_on(
    larger: tuple[Path, dict[str, str]], out: Path
) -> None:
    src, finished = larger

    def ctrl_c(progress: Progress) -> None:
        if progress.done >= 3 * PER_SHARD:
            # As a worker leaves it that is killed while it writes a record.
            (out / ".convert" / ".train-00009.npy.json.0123456789abcdef.tmp").touch()
            signal.raise_signal(signal.SIGINT)

    before = child_processes()
    with pytest.raises(KeyboardInterrupt):
        convert(src, out, **{**OPTIONS, "workers": TWO_PROCESSES}, on_progress=ctrl_c)
    assert child_processes() <= before
    assert_unfinished_and_whole(out, finished)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    report = convert(src, out, **OPTIONS)
    assert 0 < report.num_converted < 90
    assert hashes(out) == finished


@pytest.mark.parametrize(
    ("name", "put"),
    [
        (".convert/plan.json", os.mkfifo),
        (".convert/plan.json", lambda path: path.symlink_to("/dev/zero")),
        ("rejects.jsonl", Path.mkdir),
    ],
)
def test_what_is_no_file_is_named_and_not_waited_for(
    image_tree: Path, out: Path, name: str, put: Callable[[Path], None]
) -> None:
    if name == "rejects.jsonl":
        (image_tree / "train" / "n01" / "broken.JPEG").write_bytes(b"")
        convert(image_tree, out, **OPTIONS, max_bad=1)
        (out / name).unlink()
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    put(out / name)
    with must_not_block(), pytest.raises(ShardioError, match=f"{name}: expected a regular file, found "):
        convert(image_tree, out, **OPTIONS, max_bad=1)


BRACKETS = b"[" * 100_000


@pytest.mark.parametrize(
    "line",
    [b"[]", b"{}", b"x", b"\xff", b"3", BRACKETS]
    + [
        b'{"split": "train", "key": %s, "reason": %s, "detail": ""}' % pair
        for pair in ((b"[]", b'""'), (b'""', b"[]"), (b'"\\ud800"', b'""'))
    ],
    ids=lambda line: ascii(line)[:30],
)
def test_a_line_of_the_rejects_that_is_none_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rejects.jsonl"
    path.write_bytes(Reject("train", b"a", "empty", "").to_line() + line + b"\n")
    with pytest.raises(FormatError, match=r"rejects\.jsonl: line 2: expected a JSON object with split, key"):
        read_rejects(path)


def test_a_plan_that_is_none_is_another_kind_of_conversion(image_tree: Path, out: Path) -> None:
    (out / ".convert").mkdir(parents=True)
    for plan in (b"[]", b"3", b'"x"', b"\xff", b"{", BRACKETS, b'{"size": 1e999}'):
        (out / ".convert" / "plan.json").write_bytes(plan)
        with pytest.raises(ConvertError, match="holds an unfinished conversion with other options"):
            convert(image_tree, out, **OPTIONS)
