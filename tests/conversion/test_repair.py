"""A damaged set is made again to the byte, and only from what it was made from; whatever fails, it gets no worse."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import change_split, some_arrays
from command import assert_one_clear_error, run_python, shardio
from conversions import OPTIONS as PLAIN
from conversions import SIZE, TWO_PROCESSES
from disks import FailingDisk, failing
from folders import everything, flip, hashes
from numpy.typing import NDArray
from pictures import encode, random_jpeg, random_picture, write_jpeg
from PIL import Image

from shardio.conversion.convert import convert
from shardio.conversion.images.fit import Fit
from shardio.conversion.repair import repair
from shardio.errors import ConvertError, FormatError, SetNotFoundError, SourceError
from shardio.format.manifest_file import commit_manifest, load_manifest
from shardio.reading.shardset import open_shards
from shardio.sets.verify import verify

OPTIONS: dict[str, Any] = {**PLAIN, "order": "source", "exif_rotate": True, "background": (10, 20, 30), "max_bad": 7}

# Every source of the second shard of train is refused: it has a task and no file.
SOURCES = [3, 3, 3, 3, 3, 2, 2]
"""Sources of each task."""
SHARDS = ["train-00000", "", "train-00002", "train-00003", "train-00004", "val-00000", "val-00001"]
FILES = [*(f"{name}.npy" for name in SHARDS if name), "train-index.npy", "val-index.npy", "rejects.jsonl"]


def finished_before(done: int) -> int:
    """Returns how many shards are finished when so many sources are done in order, but not the shard of the last."""
    return sum(bool(name) and total < done for name, total in zip(SHARDS, accumulate(SOURCES), strict=True))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 images in train and val that are taken, of every kind, and 7 that are refused, for every reason."""
    rng = np.random.default_rng(11)
    root = tmp_path_factory.mktemp("repair") / "src"
    for folder, count in (("train/a", 6), ("train/b", 5), ("train/c", 4), ("val/a", 2), ("val/c", 1)):
        for number in range(count):
            height, width = (int(n) for n in rng.integers(20, 60, 2))
            write_jpeg(root / folder / f"{number}.jpg", random_picture(rng, height, width))
    turned = Image.Exif()
    turned[0x0112] = 6
    picture = Image.fromarray(random_picture(rng, 24, 50))
    picture.save(root / "train" / "b" / "0.jpg", "JPEG", exif=turned)
    picture.save(root / "train" / "b" / "1.jpg", "PNG", exif=turned)
    picture.convert("RGBA").save(root / "train" / "c" / "0.jpg", "WEBP", lossless=True, exif=turned)
    mended = root / "train" / "c" / "1.jpg"
    data = mended.read_bytes()
    tables = data.index(b"\xff\xdb")
    mended.write_bytes(data[:tables] + b"junk" + data[tables:])
    for number, bad in ((3, b""), (4, b"<html>"), (5, data[: len(data) // 2])):
        (root / "train" / "a" / f"{number}.jpg").write_bytes(bad)
    (root / "train" / "b" / "2.jpg").write_bytes(b"GIF89a")
    (root / "train" / "c" / "3.jpg").unlink()
    (root / "train" / "c" / "3.jpg").symlink_to("nowhere")
    (root / "val" / "a" / "0.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    Image.new("RGB", (1, 1 << 21)).save(root / "val" / "c" / "long.jpg", "PNG")
    return root


@pytest.fixture(scope="module")
def sound(source: Path) -> Path:
    out = source.with_name("sound")
    report = convert(source, out, **OPTIONS)
    assert sorted([*FILES, "manifest.json"]) == sorted(path.name for path in out.iterdir())
    assert dict(report.num_samples) == {"train": 10, "val": 2}
    assert set(report.refused) == {"empty", "unsupported", "damaged", "unreadable", "too large"}
    return out


@pytest.fixture
def out(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "out")
    return tmp_path / "out"


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "another bit": lambda path: flip(path, path.stat().st_size // 2, 3),
    "cut to nothing": lambda path: os.truncate(path, 0),
    "a byte more": lambda path: os.truncate(path, path.stat().st_size + 1),
    "missing": Path.unlink,
    "a link": link,
    "a FIFO": fifo,
}


# --- what is made again -----------------------------------------------------------------------------------------------


# Each kind of file with each damage that can mean something else there.
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(("train-00000.npy", damage) for damage in DAMAGES),
        *zip(FILES[1:], [*DAMAGES, *DAMAGES], strict=False),
        ("train-index.npy", "another bit"),
        ("rejects.jsonl", "missing"),
    ],
)
def test_any_damage_to_any_file_is_repaired_to_the_byte_and_nothing_else_is_touched(
    source: Path, sound: Path, out: Path, name: str, damage: str
) -> None:
    before = everything(out)
    DAMAGES[damage](out / name)
    assert not verify(out).ok
    report = repair(out, source, workers=1)
    assert report.repaired == (name,)
    (out / "elsewhere").unlink(missing_ok=True)
    assert hashes(out) == hashes(sound)
    assert verify(out).ok
    after = everything(out)
    assert {other for other in before if after[other] != before[other]} == {str(out / name)}


@pytest.mark.parametrize("workers", [1, TWO_PROCESSES])
def test_any_combination_of_damages_is_repaired_and_an_intact_set_left_alone(
    source: Path, sound: Path, out: Path, workers: int
) -> None:
    before = everything(out)
    assert repair(out, source).repaired == ()
    assert everything(out) == before
    rng = np.random.default_rng(workers)
    names = [name for name in FILES if rng.random() < 0.6] if workers == 1 else FILES
    for name in names:
        DAMAGES[str(rng.choice(list(DAMAGES)[:4]))](out / name)
    assert set(repair(out, source, workers=workers).repaired) == set(names)
    assert hashes(out) == hashes(sound)


def test_records_that_a_killed_conversion_left_do_not_stand_for_damaged_files(
    source: Path, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:  # killed after the set was published, before its records were removed
        patch.setattr("shardio.conversion.convert.leave", lambda out, *, all_done: None)
        convert(source, out, **OPTIONS)
    assert (out / ".convert" / "train-00000.npy.json").exists()
    damaged = ("train-00000.npy", "train-00002.npy")
    for name in damaged:
        flip(out / name, -1)
    assert repair(out, source, workers=TWO_PROCESSES).repaired == damaged
    assert hashes(out) == hashes(sound)


def test_a_reader_that_has_mapped_the_damaged_file_keeps_it(source: Path, out: Path) -> None:
    flip(out / "train-00000.npy", 4096)
    mapped = open_shards(out)
    damaged = mapped[0].image.copy()
    repair(out, source)
    np.testing.assert_array_equal(mapped[0].image, damaged)
    assert (open_shards(out)[0].image != damaged).sum() == 1


# --- what cannot be made again ----------------------------------------------------------------------------------------


@pytest.fixture
def own_source(source: Path, tmp_path: Path) -> Path:
    shutil.copytree(source, tmp_path / "src", symlinks=True)
    return tmp_path / "src"


def test_other_sources_are_refused_before_the_set_is_read(own_source: Path, out: Path) -> None:
    (out / "train-00000.npy").unlink()
    before = everything(out)
    one = own_source / "train" / "b" / "3.jpg"
    one.rename(one.with_name("other.jpg"))
    message = f"^{out}: cannot be made again from {own_source}, .*the list of sources changed"
    with pytest.raises(ConvertError, match=message):
        repair(out, own_source, on_verify=None)
    assert everything(out) == before


def test_a_changed_image_is_named_its_shard_left_as_it_is_and_all_else_repaired(
    own_source: Path, sound: Path, out: Path
) -> None:
    for damaged in ("train-00002.npy", "val-00000.npy", "rejects.jsonl"):
        with (out / damaged).open("ab") as file:
            file.write(b"x")
    left = (out / "train-00002.npy").read_bytes()
    write_jpeg(own_source / "train" / "b" / "0.jpg", random_picture(np.random.default_rng(5), 30, 30))
    with pytest.raises(ConvertError, match=rf"^{out}: 1 files cannot be made again.* are left as they are") as caught:
        repair(out, own_source)
    for part in ("train-00002.npy: expected sha256 ", "(1 samples differ: train/b/0.jpg)", "'pillow': '"):
        assert part in str(caught.value)
    assert (out / "train-00002.npy").read_bytes() == left
    expected = hashes(sound)
    assert {file for file, digest in hashes(out).items() if digest != expected[file]} == {"train-00002.npy"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train/c/2.jpg", b""),  # was taken, is refused now
        ("train/a/3.jpg", random_jpeg(0, 30, 30)),  # was refused, is taken now
    ],
)
def test_an_image_that_was_mended_or_spoilt_since_is_noticed(
    own_source: Path, sound: Path, out: Path, name: str, content: bytes
) -> None:
    for damaged in FILES:
        (out / damaged).unlink()
    (own_source / name).write_bytes(content)
    with pytest.raises(ConvertError, match="cannot be made again, and are left as they are"):
        repair(out, own_source)
    found = hashes(out)
    assert found.items() < hashes(sound).items()
    assert "train-index.npy" not in found or content
    assert "val-00000.npy" in found
    assert "rejects.jsonl" not in found


def test_other_libraries_do_no_harm_unless_their_pixels_differ(
    source: Path, sound: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = Fit.apply

    def apply_otherwise(*picture: Any) -> Any:
        sample = apply(*picture)
        return np.bitwise_xor(sample, 1, out=sample)

    monkeypatch.setattr("shardio.conversion.repair.library_versions", lambda: {"pillow": "99.0"})
    (out / "train-00000.npy").unlink()
    repair(out, source)
    assert hashes(out) == hashes(sound)
    monkeypatch.setattr(Fit, "apply", apply_otherwise)
    (out / "train-00000.npy").unlink()
    with pytest.raises(ConvertError, match=r"this machine has \{'pillow': '99\.0'\}") as caught:
        repair(out, source, workers=1)
    assert "(3 samples differ: train/a/0.jpg, train/a/1.jpg, train/a/2.jpg)" in str(caught.value)
    found = hashes(out)
    assert found.items() < hashes(sound).items()
    assert len(found) == len(FILES)


def edit(out: Path, **changes: Any) -> None:
    commit_manifest(out, replace(load_manifest(out), **changes))


def name_a_strange_shard(out: Path) -> None:
    splits = load_manifest(out).splits
    first, *others = splits["val"].shards
    edit(out, splits={**splits, "val": replace(splits["val"], shards=(replace(first, file="other.npy"), *others))})


def put_a_folder(out: Path) -> None:
    (out / "train-00000.npy").unlink()
    (out / "train-00000.npy").mkdir()


BEYOND_REPAIR: dict[str, tuple[Callable[[Path], object], dict[str, Any], type[Exception], str]] = {
    "made otherwise": (lambda out: edit(out, provenance={}), {}, ConvertError, "`convert` has not made this set"),
    "options": (lambda out: edit(out, provenance={"conversion": {}}), {}, ConvertError, "expected the options"),
    "strange shard": (name_a_strange_shard, {}, ConvertError, "other.npy: `convert` did not make it"),
    "folder": (put_a_folder, {"workers": 1}, OSError, "train-00000.npy"),
    "manifest damaged": (lambda out: flip(out / "manifest.json", -3), {}, FormatError, "manifest.json"),
    "no manifest": (lambda out: (out / "manifest.json").unlink(), {}, SetNotFoundError, "manifest.json"),
    "no workers": (lambda out: None, {"workers": 0}, ValueError, "workers must be .*; found 0"),
    "no images": (lambda out: None, {"src": "nowhere"}, SourceError, "expected a folder of images, found nothing"),
}


@pytest.mark.parametrize("case", BEYOND_REPAIR)
def test_what_cannot_be_repaired_is_named(source: Path, out: Path, case: str) -> None:
    spoil, options, error, words = BEYOND_REPAIR[case]
    spoil(out)
    with pytest.raises(error, match=words):
        repair(out, **{"src": source, **options})


# --- whatever happens on the way --------------------------------------------------------------------------------------


def assert_no_worse(out: Path, sound: Path, damaged: dict[str, str]) -> None:
    """Checks that every file is as it was or as it shall be, and that no temporary file is left."""
    whole = hashes(sound)
    for name, digest in hashes(out).items():
        assert digest in (damaged.get(name), whole.get(name)), name


def damage_all(out: Path) -> dict[str, str]:
    for name in FILES:
        flip(out / name, -2)
    return hashes(out)


def test_a_disk_that_fails_at_any_call_leaves_every_file_as_it_was_or_as_it_shall_be(
    source: Path, sound: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = ("write", "ftruncate", "posix_fallocate", "fsync", "fdatasync", "link")
    monkeypatch.setattr("disks.DISK_CALLS", writes)
    first = 0
    while True:
        first += 1
        for name in ("val-00000.npy", "val-index.npy"):  # of the smaller split: all of its tasks do their work again
            flip(out / name, -2)
        damaged = hashes(out)
        disk = FailingDisk(first, errno.EIO if first % 3 else errno.ENOSPC, for_good=first % 2 == 0)
        error: OSError | ConvertError | None = None
        with disk.installed():
            try:
                repair(out, source, workers=1)
            except (OSError, ConvertError) as caught:
                error = caught
        assert error or hashes(out) == hashes(sound), disk
        assert disk.failed or not error, disk
        assert error is None or str(out) in str(error), disk
        assert_no_worse(out, sound, damaged)
        repair(out, source, workers=1)
        assert hashes(out) == hashes(sound)
        if not disk.failed:
            break
    assert first > 10


@pytest.mark.parametrize("after", [1, 9])
def test_an_interrupt_leaves_no_trace_and_the_same_call_goes_on(
    source: Path, sound: Path, out: Path, after: int
) -> None:
    damaged = damage_all(out)

    def interrupt(done: int, total: int) -> None:
        if done >= after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        repair(out, source, workers=2, on_progress=interrupt)
    assert_no_worse(out, sound, damaged)
    report = repair(out, source)
    assert len(report.repaired) == len(FILES) - finished_before(after)
    assert hashes(out) == hashes(sound)


def test_where_nothing_can_be_opened_any_more_the_first_error_is_the_one_that_is_raised(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage_all(out)

    def refuse(done: int, total: int) -> None:
        monkeypatch.setattr(os, "open", failing(errno.EACCES))
        raise OSError(errno.EACCES, "the first")

    with pytest.raises(OSError, match="the first"):
        repair(out, source, workers=1, on_progress=refuse)


def test_progress_reaches_the_total_of_what_has_to_be_read(source: Path, out: Path) -> None:
    flip(out / "train-00000.npy", 4100)
    seen: list[tuple[int, int]] = []
    repair(out, source, on_progress=lambda *now: seen.append(now))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    seen.clear()
    damage_all(out)
    read: list[tuple[int, int]] = []
    repair(out, source, on_progress=lambda *now: seen.append(now), on_verify=lambda *now: read.append(now))
    assert seen == [(done, 19) for done in range(1, 20)]
    assert sum(nbytes for nbytes, _ in read) == read[0][1] == load_manifest(out).nbytes


def test_repairs_at_the_same_time_all_succeed(source: Path, sound: Path, out: Path) -> None:
    for _ in range(2):
        damage_all(out)
        barrier = threading.Barrier(3)

        def work(number: int, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(30)
            repair(out, source, workers=1)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(work, range(3)))
        assert hashes(out) == hashes(sound)


def temporaries(out: Path) -> list[str]:
    return [path.name for path in out.iterdir() if path.name.endswith(".tmp")]


def test_a_killed_repair_leaves_no_torn_file_and_the_next_one_sweeps_and_goes_on(
    source: Path, sound: Path, out: Path
) -> None:
    """It is killed when five sources are done, and their shard is not."""
    damaged = damage_all(out)
    program = (
        "import os, sys\nfrom shardio.conversion.repair import repair\n"
        "def kill(done, total):\n    if done == 5:\n        os.kill(os.getpid(), 9)\n"
        "repair(sys.argv[1], sys.argv[2], workers=1, on_progress=kill)\n"
    )
    assert run_python("-c", program, out, source).returncode == -signal.SIGKILL
    assert len(temporaries(out)) == 1
    whole = hashes(sound)
    for name, digest in hashes(out).items():
        assert name in temporaries(out) or digest in (damaged[name], whole[name]), name
    report = repair(out, source)
    assert len(report.repaired) == len(FILES) - finished_before(5)
    assert hashes(out) == whole


# --- arrays ----------------------------------------------------------------------------------------------------------


def test_damaged_masks_are_made_again_and_without_their_sources_all_else_is(
    with_masks: tuple[Path, dict[str, Any]], undisturbed: dict[str, str], tmp_path: Path
) -> None:
    src, options = with_masks
    out = tmp_path / "undisturbed"
    flip(out / "train-mask-00001.npy")
    (out / "train-mask-00002.npy").unlink()
    (out / "val-mask-00000.npy").write_bytes(b"")
    flip(out / "val-mask-crc32.npy")
    damaged = {"train-mask-00001.npy", "train-mask-00002.npy", "val-mask-00000.npy", "val-mask-crc32.npy"}
    flip(out / "train-00001.npy")
    with pytest.raises(ConvertError, match=r"train-mask-00001.npy, .*val-mask-crc32.npy cannot be made again without"):
        repair(out, src)
    assert {problem.file for problem in verify(out).problems} == damaged
    for name in ("train-00001.npy", "train-index.npy", "rejects.jsonl", "val-00000.npy", "train-mask-crc32.npy"):
        flip(out / name)
        damaged.add(name)
    assert set(repair(out, src, masks=options["masks"], workers=2).repaired) == damaged
    assert hashes(out) == undisturbed


def test_a_changed_mask_makes_no_other_set(
    with_masks: tuple[Path, dict[str, Any]], undisturbed: dict[str, str], tmp_path: Path
) -> None:
    src, options = with_masks
    out = tmp_path / "undisturbed"
    for path in (options["masks"] / "train").glob("*/*.png"):
        height, width = np.asarray(Image.open(path)).shape
        path.write_bytes(encode(np.zeros((height, width), np.uint8), "PNG"))
    flip(out / "train-mask-00001.npy")
    flip(out / "train-00001.npy")
    with pytest.raises(ConvertError, match=r"1 files cannot be made again.*train-mask-00001.npy: expected sha256"):
        repair(out, src, masks=options["masks"])
    assert [problem.file for problem in verify(out).problems] == ["train-mask-00001.npy"]


def test_an_array_that_convert_did_not_make_is_named(image_tree: Path, tmp_path: Path) -> None:
    convert(image_tree, tmp_path / "out", **PLAIN)
    count = len(open_shards(tmp_path / "out"))
    values: NDArray[Any] = some_arrays(count, SIZE, SIZE)["clip"][1]
    change_split(tmp_path / "out", {"clip": ("array", values)})
    flip(tmp_path / "out" / "train-clip-00000.npy")
    flip(tmp_path / "out" / "train-00000.npy")
    with pytest.raises((ConvertError, FormatError), match=r"train-clip-00000.npy: `convert` did not make it"):
        repair(tmp_path / "out", image_tree)
    assert [problem.file for problem in verify(tmp_path / "out").problems] == ["train-clip-00000.npy"]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_repaired(source: Path, sound: Path, out: Path) -> None:
    flip(out / "val-00000.npy", 4500)
    (out / "val-index.npy").unlink()
    result = shardio("repair", out, source, "--workers", "1")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        f"repaired: {out / 'val-00000.npy'}",
        f"repaired: {out / 'val-index.npy'}",
        f"{out}: intact, 2 files repaired",
        f"next: shardio verify {out}",
    ]
    assert hashes(out) == hashes(sound)
    (out / "rejects.jsonl").unlink()
    assert json.loads(shardio("repair", out, source, "--json").stdout)["repaired"] == ["rejects.jsonl"]


def test_the_command_fails_where_the_set_cannot_be_made_again(own_source: Path, out: Path, tmp_path: Path) -> None:
    (own_source / "train" / "a" / "0.jpg").unlink()
    result = shardio("repair", out, own_source)
    assert_one_clear_error(result, 1, str(out), "cannot be made again from", "number of sources 19, here 18")
    assert_one_clear_error(shardio("repair", tmp_path, own_source), 1, "manifest.json")
    assert_one_clear_error(shardio("repair", out), 2, "Missing argument 'SRC'")
