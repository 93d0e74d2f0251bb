"""Conversions: the right samples, the same bytes whatever happened on the way, and clear refusals."""

from __future__ import annotations

import base64
import contextlib
import errno
import gc
import hashlib
import json
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import shutil
import signal
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
    interrupted,
    rejects,
    undisturbed,
)
from deadlines import must_not_block
from disks import FailingDisk
from folders import everything, flip, hashes, put, stamps
from pictures import encode, random_jpeg, random_picture, write_jpeg
from PIL import Image
from plain_sets import make_plain_set
from storages import scan_tree

from shardio.conversion import claim
from shardio.conversion.convert import convert
from shardio.conversion.images.decode import decode_image
from shardio.conversion.images.fit import Fit
from shardio.conversion.options import ConvertOptions, Progress, count_bad
from shardio.conversion.plan import library_versions, order_sources
from shardio.conversion.records import Reject, read_rejects
from shardio.conversion.repair import repair
from shardio.conversion.report import show_progress
from shardio.errors import ConvertError, FormatError, ShardioError, SpaceError
from shardio.format.entries import RejectsEntry
from shardio.format.layout import MAX_SIDE, crc32
from shardio.kernels.resample import to_yuv420
from shardio.reading.shardset import open_shards
from shardio.sets.verify import verify
from shardio.system.files import _machine
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


def test_the_order_of_listing_the_place_of_the_tree_and_how_it_is_named_do_not_matter(
    image_tree: Path, out: Path, finished: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "elsewhere" / "tree"
    for path in sorted(image_tree.rglob("*.JPEG"), reverse=True):  # made in another order, at other times
        name = str(path.relative_to(image_tree))
        put(moved, name, content=path.read_bytes())
        os.utime(moved / name, (1, 1))
    monkeypatch.chdir(moved.parent)
    assert convert("tree", f"../{out.name}", **OPTIONS).out == str(out)
    assert hashes(out) == finished


@pytest.mark.parametrize("workers", [2, TWO_PROCESSES])
def test_threads_and_processes_of_a_conversion_in_another_thread_give_the_same_bytes(
    image_tree: Path, out: Path, finished: dict[str, str], workers: int
) -> None:
    processes: list[int] = []

    def look(progress: Progress) -> None:
        processes.append(len(multiprocessing.active_children()))

    with ThreadPoolExecutor(1) as pool:
        report = pool.submit(convert, image_tree, out, **{**OPTIONS, "workers": workers}, on_progress=look).result(60)
    assert report.num_converted == report.num_sources == 18
    assert max(processes) == (2 if workers == TWO_PROCESSES else 0)
    assert hashes(out) == finished


# --- the right samples ------------------------------------------------------------------------------------------------


def check_samples(src: Path, out: Path, fit: Fit, order: str = "shuffled") -> int:
    """Compares all samples with the decoder and resizer, called by hand in the order of the plan. Returns the count."""
    tree, total = scan_tree(src), 0
    for split, listed in tree.splits.items():
        pixels = np.concatenate([np.load(path) for path in sorted(out.glob(f"{split}-[0-9]*.npy"))])
        index = np.load(out / f"{split}-index.npy")
        sources = order_sources(listed, ConvertOptions(order=order))  # type: ignore[arg-type]
        kept = [source for source in sources if source.key in set(index["key"].tolist())]
        for source, row, sample in zip(kept, index, pixels, strict=True):
            data, colors = (src / os.fsdecode(source.key)).read_bytes(), fit.background
            decoded = decode_image(data, exif_rotate=fit.exif_rotate, background=colors).pixels
            np.testing.assert_array_equal(sample, fit.apply(decoded), err_msg=str(source.key))
            assert row["key"] == source.key
            assert row["label"] == source.label == sorted(tree.classes).index(source.key.split(b"/")[-2].decode())
        opened = open_shards(out, split)
        assert (len(opened), opened.classes) == (len(index), tree.classes)
        total += len(index)
    return total


@pytest.mark.parametrize(
    ("fit", "order"),
    [
        (Fit((16, 16)), "shuffled"),
        (Fit((12, 20), "squash", "bilinear", exif_rotate=True), "source"),
        (Fit((20, 12), "pad", "lanczos", background=(0, 128, 0)), "shuffled"),
    ],
)
def test_samples_are_the_decoded_and_resized_sources(image_tree: Path, out: Path, fit: Fit, order: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    rng = np.random.default_rng(9)
    put(image_tree, "train/n01/turned.jpg", content=encode(random_picture(rng, 30, 50), "JPEG", exif=exif))
    clear = np.dstack([random_picture(rng, 20, 20), np.zeros((20, 20), np.uint8)])
    put(image_tree, "train/n01/clear.png", content=encode(clear, "PNG"))
    how: dict[str, Any] = {"resample": fit.resample, "exif_rotate": fit.exif_rotate, "background": fit.background}
    report = convert(image_tree, out, **{**OPTIONS, **how, "size": fit.size, "fit": fit.mode, "order": order})
    assert check_samples(image_tree, out, fit, order) == 20
    assert dict(report.num_samples) == {"train": 14, "val": 6}
    assert verify(out).ok


def test_fast_reduces_what_is_large_and_keeps_the_sizes_of_the_sources(image_tree: Path, tmp_path: Path) -> None:
    for quality in ("exact", "fast"):
        convert(image_tree, tmp_path / quality, **{**OPTIONS, "size": 8, "order": "source", "quality": quality})
    exact, fast = open_shards(tmp_path / "exact"), open_shards(tmp_path / "fast")
    names = ["key", "label", "source_width", "source_height"]
    assert exact.index[names].tolist() == fast.index[names].tolist()
    reduced = 0
    for row, before, after in zip(exact.index, exact, fast, strict=True):
        place = Fit((8, 8)).placement(int(row["source_height"]), int(row["source_width"]))
        if min(row["source_height"] / place.resized[0], row["source_width"] / place.resized[1]) >= 4:
            reduced += 1
            assert 0 < np.abs(before.image.astype(int) - after.image).mean() < 4
        else:
            np.testing.assert_array_equal(before.image, after.image)
    assert 3 <= reduced <= 9


def test_names_that_are_no_utf8_or_need_quoting_are_kept(tmp_path: Path, out: Path) -> None:
    names = [b"\xff\xfe", b"new\nline", b'quo"te', b"sp ace", "é☃".encode()]
    for name in names:
        put(tmp_path / "src", b"class %s/%s.jpg" % (name, name), content=random_jpeg(6, 20, 20))
        put(tmp_path / "src", b"class %s/bad %s" % (name, name), content=b"\xff\xd8\xff")
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


BAD: dict[str, tuple[bytes | None, str, str]] = {
    "train/n01/empty.JPEG": (b"", "empty", "the file has no bytes"),
    "train/n02/page.JPEG": (b"<html>404</html>", "unsupported", "found text"),
    "train/n02/cut.JPEG": (random_jpeg(0, 90, 90)[:-200], "damaged", ""),
    "train/n03/gone.JPEG": (None, "unreadable", "No such file or directory"),
    "train/n03/long.png": (encode(Image.new("RGB", (20_000, 1)), "PNG"), "too large", "20000 x 1 resized: expected"),
    "val/n01/bytes.JPEG": (bytes(range(100)), "unsupported", "found something else"),
}


def test_refused_images_are_left_out_listed_and_counted(image_tree: Path, out: Path) -> None:
    for name, (content, *_) in BAD.items():
        if content is None:
            (image_tree / name).symlink_to("nowhere.JPEG")
        else:
            put(image_tree, name, content=content)
    # 512 x 20,000 x 512 pixels would be too many: the long picture is one only at a larger size.
    report = convert(image_tree, out, **{**OPTIONS, "size": 512, "shard_size": 1 << 22, "max_bad": 6, "workers": 2})
    listed = {line["key"]: line for line in rejects(out)}
    assert set(listed) == set(BAD)
    for name, (_, reason, detail) in BAD.items():
        line = listed[name]
        assert set(line) == {"split", "key", "reason", "detail"}
        assert (line["split"], line["reason"]) == (name.split("/")[0], reason), name
        assert detail in line["detail"], name
    assert report.refused == Counter(reason for _, reason, _ in BAD.values())
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


def test_a_limit_is_a_count_or_a_share() -> None:
    assert [count_bad(percent / 100, 100) for percent in range(101)] == list(range(101))  # 0.29 * 100 < 29
    assert [count_bad(limit, 18) for limit in (0, 3, 0.0, 0.06, 1 / 6, 0.5)] == [0, 3, 0, 1, 3, 9]


WRONG: dict[str, tuple[Any, ...]] = {
    "max_bad": (-1, 1.5, -0.1, float("nan"), "1%", None),
    "size": ("256", 0, (4, 5, 6), (4, 0), (-1, 4), (MAX_SIDE + 1, 4), (4,), (4.0, 4), ("4", 4), (True, 4), ()),
    "shard_size": ("4GiB", 4e9, 0),
    "seed": ("1", -1, 1 << 64),
    "part": ((3, 2), (0, 4), (1, 0), (-1, 4), (1.0, 4), (1, "4"), (True, 4)),
    "workers": ("2", 1.5, 0, -2),
    "fit": ("stretch",),
    "resample": ("box",),
    "order": ("random",),
    "quality": ("good",),
    "background": ((1, 2), (1, 2, 3, 4), (1, 2, 256), (-1, 2, 3), (1.0, 2, 3), (True, 2, 3), ()),
    "exif_rotate": (1,),
}
UNFIT: list[dict[str, Any]] = [
    {"background": "dull"},
    {"fit": "adm", "size": (4, 5)},
    {"fit": "adm", "resample": "bilinear"},
    {"fit": "adm", "quality": "fast"},
]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({name: one}, f"{name} must .*; found ") for name, values in WRONG.items() for one in values),
        *((options, f"(expected a color|'{options.get('fit')}' needs) ") for options in UNFIT),
    ],
)
def test_options_that_make_no_sense_are_refused_before_src_is_scanned(
    out: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        convert("no images", out, **{**OPTIONS, **options})
    assert not out.exists()


def test_past_the_limit_all_bad_images_are_named_and_allowing_or_mending_them_redoes_no_other_shard(
    image_tree: Path, out: Path, tmp_path: Path
) -> None:
    sound, mended = tmp_path / "sound", tmp_path / "mended"
    shutil.copytree(image_tree, sound)
    names = ["train/n01/n01_1.JPEG", "val/n03/n03_1.JPEG"]  # in the first and in the last shard
    damage(image_tree, *names)
    options = {**OPTIONS, "order": "source"}
    for _ in range(2):
        with pytest.raises(ConvertError, match=f"^{out}: .* 0 refused images of 18, found 2 after 18 ") as caught:
            convert(image_tree, out, **options, max_bad=0)
        first, *named = str(caught.value).splitlines()
        assert f"{out / 'rejects.jsonl'} lists the refused images: mend" in first  # not: remove, which is another plan
        assert [line.partition(": empty: ")[0].strip() for line in named] == names
        assert [(line["key"], line["reason"]) for line in rejects(out)] == [(name, "empty") for name in names]
        assert not (out / "manifest.json").exists()
    shutil.copytree(out, mended)
    before = stamps(out)
    assert set(before) == {*(f"train-0000{number}.npy" for number in range(4)), "val-00000.npy", "val-00001.npy"}

    report = convert(image_tree, out, **options, max_bad=2)
    assert (report.num_converted, report.refused) == (0, {"empty": 2})
    assert str(report).startswith("published: other calls converted all images\n")
    assert convert(image_tree, out, **options, max_bad=2).published_before
    assert [line["key"] for line in rejects(out)] == names
    assert stamps(out) == before
    assert check_samples(image_tree, out, Fit((SIZE, SIZE)), "source") == 16

    for name in names:
        shutil.copyfile(sound / name, image_tree / name)
    before = stamps(mended)
    assert convert(image_tree, mended, **options, max_bad=0).num_converted == 6
    after = stamps(mended)
    assert {name for name in before if after[name] != before[name]} == {"train-00000.npy", "val-00001.npy"}
    convert(sound, tmp_path / "reference", **options)
    assert hashes(mended) == hashes(tmp_path / "reference")


@pytest.mark.parametrize(("limit", "most"), [("_MOST_REFUSED", 4), ("_MOST_DONE", 5)])
def test_a_large_collection_is_not_converted_to_its_end_for_nothing(
    limit: str, most: int, image_tree: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(image_tree, *(str(path.relative_to(image_tree)) for path in image_tree.rglob("*.JPEG")))
    monkeypatch.setattr(f"shardio.conversion.report.{limit}", most)
    with pytest.raises(ConvertError, match=f"found {most} after {most} images;"):
        convert(image_tree, out, **{**OPTIONS, "workers": 1}, max_bad=0)


@pytest.mark.parametrize("labels", [None, "none"])
def test_a_shard_of_refused_images_only_leaves_a_gap_and_no_file(
    image_tree: Path, out: Path, labels: str | None
) -> None:
    damage(image_tree, *(f"train/n01/n01_{i}.JPEG" for i in range(3)))
    report = convert(image_tree, out, **OPTIONS, order="source", max_bad=3, labels=labels)
    assert (report.num_shards, report.num_samples) == (5, {"train": 9, "val": 6})
    assert not (out / "train-00000.npy").exists()
    assert verify(out).ok


def test_a_split_of_refused_images_only_is_not_published(image_tree: Path, out: Path) -> None:
    damage(image_tree, *(str(path.relative_to(image_tree)) for path in image_tree.glob("val/*/*")))
    with pytest.raises(ConvertError, match="split 'val': every image was refused") as caught:
        convert(image_tree, out, **OPTIONS, max_bad=1.0)
    assert str(caught.value).startswith(f"{out}: ")
    assert not (out / "manifest.json").exists()


# --- the same call again, and other calls -----------------------------------------------------------------------------


def test_the_same_call_again_does_nothing(image_tree: Path, out: Path) -> None:
    first = convert(image_tree, out, **OPTIONS)
    before, seen = everything(out), list[Progress]()
    again = convert(image_tree, out, **{**OPTIONS, "workers": 7}, on_progress=seen.append)
    assert (again.digest, again.num_samples, again.nbytes) == (first.digest, first.num_samples, first.nbytes)
    assert (again.num_converted, seen, everything(out)) == (0, [], before)


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


def test_other_versions_of_libraries_do_not_go_on_with_unfinished_work_but_know_a_finished_set(
    image_tree: Path, out: Path, finished: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(image_tree, out, 10)
    before = everything(out)
    newer = {**library_versions(), "pillow": "99.0"}
    with monkeypatch.context() as patch:
        patch.setattr(claim, "library_versions", lambda: newer)
        with pytest.raises(ConvertError, match=f"^{out}: .*an unfinished conversion with other .*'pillow': '99.0'"):
            convert(image_tree, out, **OPTIONS)
        assert everything(out) == before
    convert(image_tree, out, **OPTIONS)
    assert hashes(out) == finished
    monkeypatch.setattr(claim, "library_versions", lambda: newer)
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


OCCUPIED: dict[str, tuple[Callable[[Path], object], str]] = {
    "file": (lambda out: out.write_text("mine"), "file"),
    "dangling link": (lambda out: out.symlink_to("nowhere"), "symbolic link"),
    "set of ShardWriter": (
        lambda out: make_plain_set(out.parent, 20).rename(out),
        "a published set that `convert` did not make",
    ),
    **{
        name: (lambda out, name=name: put(out, name), f"expected no folder.*found '{name.rstrip('/')}' in it")  # type: ignore[misc]
        for name in ("notes.txt", "folder/", ".hidden", "train-00000.npy", "rejects.jsonl")
    },
}


@pytest.mark.parametrize("what", OCCUPIED)
def test_what_is_not_a_conversions_own_folder_is_refused_and_left_alone(image_tree: Path, out: Path, what: str) -> None:
    make, words = OCCUPIED[what]
    make(out)
    before = everything(out), out.lstat().st_mtime_ns
    with pytest.raises(ConvertError, match=f"^{out}: .*{words}"):
        convert(image_tree, out, **OPTIONS)
    assert (everything(out), out.lstat().st_mtime_ns) == before


# --- room -------------------------------------------------------------------------------------------------------------


def test_room_for_the_shards_that_are_left_is_asked_for_before_anything_is_written(
    image_tree: Path, out: Path, finished: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def have_free(nbytes: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, nbytes))

    needed = 6 * 4096 + 18 * SIZE * SIZE * 3
    have_free(needed - 1)
    with pytest.raises(SpaceError, match=f"^{out}: .* {needed:,} more bytes .* found {needed - 1:,} bytes free"):
        convert(image_tree, out, **OPTIONS)
    assert not out.exists()
    have_free(needed)
    interrupted(image_tree, out, 10)  # three shards are done
    have_free(3 * (4096 + PER_SHARD * SIZE * SIZE * 3))
    convert(image_tree, out, **OPTIONS)
    assert hashes(out) == finished


def test_a_disk_that_fails_at_any_call_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Calls that read are left out: a source that cannot be opened is a refused image, which other tests are about.
    calls = ("write", "pwrite", "ftruncate", "posix_fallocate", "fsync", "fdatasync", "link")
    monkeypatch.setattr("disks.DISK_CALLS", calls)
    src, reference = tmp_path / "src", tmp_path / "reference"
    for number, name in enumerate(("train/a/1.jpg", "train/a/2.jpg", "train/b/3.jpg")):
        put(src, name, content=random_jpeg(number, 16, 20))
    put(src, "train/b/bad.jpg", content=b"")
    options: dict[str, Any] = {"size": 8, "shard_size": 4096 + 2 * 192, "workers": 1, "max_bad": 1}
    with FailingDisk(0, errno.EIO, for_good=False).installed() as counting:
        convert(src, reference, **options)
    expected = hashes(reference)
    assert counting.num_calls > 40
    unclear = []
    for first in range(1, counting.num_calls + 1):
        code = errno.ENOSPC if first % 3 else errno.EIO
        disk = FailingDisk(first, code, for_good=first % 2 == 0)
        out = tmp_path / f"out-{first}"
        error: OSError | ConvertError | None = None
        with disk.installed():
            try:
                convert(src, out, **options)
            except (OSError, ConvertError) as caught:
                error = caught
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
        convert(src, out, **options)
        assert hashes(out) == expected, disk
    assert not unclear, "errors that do not name the file or the way out:\n" + "\n".join(unclear)


# --- going on ---------------------------------------------------------------------------------------------------------


def test_an_interrupt_at_any_image_leaves_no_trace_says_what_is_kept_and_the_same_call_goes_on(
    image_tree: Path, tmp_path: Path, finished: dict[str, str]
) -> None:
    for after in (1, 3, 4, 11, 18):
        out, kept = tmp_path / f"out-{after}", (after - 1) // PER_SHARD * PER_SHARD
        said = f"^{kept} of 18 images are kept in {out}$" if kept else "no image is kept yet"
        with pytest.raises(KeyboardInterrupt, match=said):
            convert(image_tree, out, **{**OPTIONS, "workers": 1 + after % 2}, on_progress=Interrupt(after))
        assert_unfinished_and_whole(out, finished)
        assert len(stamps(out)) == kept // PER_SHARD
        seen: list[Progress] = []
        options = {**OPTIONS, "workers": TWO_PROCESSES if after == 11 else 1}
        assert convert(image_tree, out, **options, on_progress=seen.append).num_converted == 18 - kept
        assert seen[0] in (Progress(kept, 0, 18, kept=kept), Progress(1, 0, 18))
        assert seen[-1] == Progress(18, 0, 18, kept=kept)
        assert hashes(out) == finished, after


def change_label(record: Path) -> None:
    fields = json.loads(record.read_bytes())
    rows = bytearray(base64.b64decode(fields["rows"]))
    rows[0] ^= 1
    record.write_text(json.dumps({**fields, "rows": base64.b64encode(rows).decode()}))


SPOILS: dict[str, Callable[[Path, Path], object]] = {
    "record lost": lambda shard, record: record.unlink(),
    "record cut": lambda shard, record: os.truncate(record, record.stat().st_size - 30),
    "record of nonsense": lambda shard, record: record.write_bytes(b'{"entry": [1, 2]}'),
    "record of another label": lambda shard, record: change_label(record),
    "shard lost": lambda shard, record: shard.unlink(),
    "shard cut": lambda shard, record: os.truncate(shard, shard.stat().st_size - 1),
    "shard of another bit": lambda shard, record: flip(shard),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_shard_without_a_sound_record_is_done_again(
    image_tree: Path, out: Path, finished: dict[str, str], spoil: str
) -> None:
    interrupted(image_tree, out, 18)
    SPOILS[spoil](out / "train-00001.npy", out / ".convert" / "train-00001.npy.json")
    assert convert(image_tree, out, **OPTIONS).num_converted == 6
    assert hashes(out) == finished


@pytest.mark.parametrize("is_finished", [False, True])
def test_what_killed_processes_left_is_swept(
    image_tree: Path, out: Path, finished: dict[str, str], is_finished: bool
) -> None:
    if is_finished:
        convert(image_tree, out, **OPTIONS)
        put(out, ".convert/train-00000.npy.refused.jsonl", content=b"")
    put(out, f".train-00000.npy.{_machine()}-0123456789abcdef.tmp", content=b"half")
    assert convert(image_tree, out, **OPTIONS).num_converted == (0 if is_finished else 18)
    assert hashes(out) == finished
    assert not (out / ".convert").exists()


def test_a_conversion_that_comes_too_late_for_a_folder_leaves_nothing_there(
    image_tree: Path, out: Path, finished: dict[str, str], meanwhile: Callable[..., None]
) -> None:
    meanwhile(claim, "make_folder", lambda: convert(image_tree, out, **OPTIONS))
    with pytest.raises(ConvertError, match="holds a finished set of another conversion"):
        convert(image_tree, out, **{**OPTIONS, "seed": 7})
    assert hashes(out) == finished
    assert not (out / ".convert").exists()


def test_the_plan_of_a_conversion_that_came_too_late_does_not_keep_others_from_the_set(
    image_tree: Path, out: Path, finished: dict[str, str], meanwhile: Callable[..., None]
) -> None:
    def do() -> None:
        convert(image_tree, out, **OPTIONS)
        put(out, ".convert/plan.json", content=b'{"seed": 7}')

    meanwhile(claim, "make_folder", do)
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
            (out / ".convert" / f".train-00009.npy.json.{_machine()}-0123456789abcdef.tmp").touch()
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
    path.write_bytes(data := Reject("train", b"a", "empty", "").to_line() + line + b"\n")
    entry = RejectsEntry(path.name, len(data), hashlib.sha256(data).hexdigest(), 2)
    with pytest.raises(FormatError, match=r"rejects\.jsonl: line 2: expected a JSON object with split, key"):
        read_rejects(tmp_path, entry)


def test_rejects_that_are_not_those_of_the_manifest_are_named(image_tree: Path, out: Path) -> None:
    (image_tree / "train" / "n01" / "broken.JPEG").write_bytes(b"")
    convert(image_tree, out, **OPTIONS, max_bad=1)
    path = out / "rejects.jsonl"
    path.write_bytes(path.read_bytes().replace(b"broken", b"sounds"))
    with pytest.raises(FormatError, match=r"rejects\.jsonl: sha256"):
        convert(image_tree, out, **OPTIONS, max_bad=1)


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: os.truncate(path, 5000)])
def test_a_finished_set_that_lacks_a_file_is_not_called_done(
    image_tree: Path, out: Path, finished: dict[str, str], spoil: Callable[[Path], None]
) -> None:
    convert(image_tree, out, **OPTIONS)
    spoil(out / "train-00001.npy")
    with pytest.raises(FormatError, match=r"is damaged: .*train-00001\.npy: .*repair"):
        convert(image_tree, out, **OPTIONS)
    repair(out, image_tree)
    assert convert(image_tree, out, **OPTIONS).published_before
    assert hashes(out) == finished


def test_a_plan_that_is_none_is_another_kind_of_conversion(image_tree: Path, out: Path) -> None:
    for plan in (b"[]", b"3", b'"x"', b"\xff", b"{", BRACKETS, b'{"size": 1e999}'):
        put(out, ".convert/plan.json", content=plan)
        with pytest.raises(ConvertError, match="holds an unfinished conversion with other options"):
            convert(image_tree, out, **OPTIONS)
