"""Sets made from others: what they hold, what they share, and that no call ever leaves half of one."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import change_split, some_arrays
from command import assert_notices, assert_one_clear_error, printed_by, shardio
from disks import failing
from folders import contents, flip, hashes
from halved import make_halved_set
from hooks import call_before
from numpy.typing import NDArray
from pictures import sample_pixels
from places import CHAOS

from shardio.changes import carry
from shardio.changes.carry import ChangeReport, Room
from shardio.changes.change import change
from shardio.changes.merge import merge
from shardio.conversion.convert import convert
from shardio.conversion.repair import repair
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.errors import ConvertError, FormatError, SetNotFoundError, ShardioError, SourceError, SpaceError
from shardio.format.layout import HEADER_NBYTES
from shardio.format.manifest_file import commit_manifest, load_manifest
from shardio.reading.shardset import open_shards
from shardio.sets.new_folder import folder_of
from shardio.sets.publish import publish
from shardio.sets.selection import Selection
from shardio.sets.verify import verify
from shardio.system import files
from shardio.system.files import AtomicFile

SHAPE = (6, 5, 3)


@pytest.fixture
def out(make_set: Callable[..., Path]) -> Iterator[Path]:
    """25 samples in three shards. No test may change a byte of it."""
    folder = make_set(25)
    before = hashes(folder)
    yield folder
    assert hashes(folder) == before


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return tmp_path / "new"


def keep(out: Path, new: Path, **conditions: Any) -> ChangeReport:
    return change(out, new, keep=Selection(**conditions))


def keys_of(folder: Path, split: str = "train") -> list[str]:
    return [key.decode() for key in open_shards(folder, split).index["key"].tolist()]


def key(sample: int) -> str:
    return f"c{sample % 7}/{sample}.png"


KEYS = [key(i) for i in range(25)]


def samples_of(folder: Path, split: str = "train") -> list[int]:
    """The numbers that the samples had in `make_set`, after their pixels were compared."""
    opened = open_shards(folder, split)
    numbers = [int(one.split("/")[1].removesuffix(".png")) for one in keys_of(folder, split)]
    for number, (image, _) in zip(numbers, opened, strict=True):
        assert np.array_equal(image, sample_pixels(number, SHAPE))
    return numbers


def left_beside(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".")]


# --- the model -------------------------------------------------------------------------------------------------------


def test_random_sequences_of_changes_equal_a_model_whatever_is_killed(tmp_path: Path) -> None:
    printed = printed_by(CHAOS / "change_sets.py", "--sequences", "8", "--seed", "3", TMPDIR=str(tmp_path))
    assert "violations=[]" in printed
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("careless", "told"),
    [
        ("carry.write_order = lambda *a: real(*a[:3], a[3][::-1].copy())", "other samples"),
        ("carry.try_link = lambda a, b: [shutil.copy(a, str(b)), open(a, 'ab').write(b'x')]", "changed"),
        ("carry.rename_new = lambda a, b: [rename(a, b), (b.parent / 'left').mkdir(exist_ok=True)]", "left"),
        (
            "merge._plan = lambda drafts, *a, **k: plan([replace(d, pixels='rgb') for d in drafts], *a, **k)",
            "both kinds",
        ),
    ],
)
def test_a_careless_change_is_noticed(careless: str, told: str, tmp_path: Path) -> None:
    assert_notices("change_sets.change_sets(Path(sys.argv[1]), 6, 1, say)", careless, told, tmp_path)


def test_what_a_killed_call_has_left_is_swept_by_one_that_is_refused(out: Path, new: Path) -> None:
    keep(out, new, keys="*")
    for call, told in (
        (lambda: keep(out, new, keys="*"), "new: expected nothing there"),
        (lambda: publish(out.with_name("moved"), new, move=True), "moved.*not found"),
    ):
        lock = AtomicFile(new)
        folder_of(lock.temporary).mkdir()
        del lock
        with pytest.raises(ShardioError, match=told):
            call()
        assert left_beside(new.parent) == []


@pytest.mark.parametrize("operation", ["change", "merge", "publish"])
def test_a_set_that_takes_the_place_of_the_unfinished_folder_is_not_changed(
    out: Path, new: Path, make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    make = {
        "change": lambda: change(out, new, keep=Selection(keys="c1/*"), arrays={"one": np.arange(4.0)}),
        "merge": lambda: merge([out, make_set(5)], new, same_keys="allow", same_images="keep"),
        "publish": lambda: publish(out, new),
    }[operation]
    other, moved = make_set(60), new.with_name("moved")
    before = hashes(other)
    one_at_a_time = threading.Lock()  # threads copy the files

    def exchange(*_: object) -> None:
        with one_at_a_time:
            for folder in () if moved.exists() else list(new.parent.glob(".new.*.d")):
                folder.rename(moved)
                folder.symlink_to(other)

    call_before(monkeypatch, AtomicFile, "__init__", exchange)
    with pytest.raises(ConvertError, match=r"\.new\."):
        make()
    assert moved.exists()
    assert hashes(other) == before
    assert not os.path.lexists(new)


def test_of_two_calls_at_the_same_time_one_makes_the_set(out: Path, new: Path) -> None:
    barrier = threading.Barrier(2)

    def attempt(label: str) -> str:
        barrier.wait()
        try:
            change(out, new, keep=Selection(classes=label), on_room=lambda room: barrier.wait() and None)
        except ConvertError as error:
            return str(error)
        return label

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(attempt, ["c1", "c2"]))
    (made,) = {"c1", "c2"}.intersection(ends)
    assert sum("expected nothing there" in end for end in ends) == 1
    assert samples_of(new) == [i for i in range(25) if i % 7 == int(made[1])]
    assert left_beside(new.parent) == []


# --- files -----------------------------------------------------------------------------------------------------------


def test_files_that_stay_are_hard_links_and_the_rest_is_new(out: Path, new: Path) -> None:
    rooms: list[Room] = []
    report = change(out, new, labels={key(3): "c0"}, on_room=rooms.append)
    shared = [path.name for path in new.iterdir() if path.stat().st_nlink > 1]
    assert sorted(shared) == [f"train-0000{i}.npy" for i in range(3)]
    for name in shared:
        assert (new / name).samefile(out / name)
    assert report.linked_nbytes + report.written_nbytes == report.nbytes
    assert (report.copied_nbytes, report.cloned_nbytes) == (0, 0)
    assert rooms[0].copied_nbytes == 0
    assert report.digest == load_manifest(new).digest != load_manifest(out).digest


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_where_no_links_can_be_made_files_are_copied_and_that_is_said_before(
    code: int, out: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", failing(code))
    said: list[tuple[str, int]] = []
    report = change(
        out,
        new,
        drop=Selection(classes="c1"),
        on_room=lambda room: said.append(("room", room.copied_nbytes)),
        on_progress=lambda nbytes, total: said.append(("copied", total)),
    )
    assert said[0] == ("room", report.copied_nbytes)
    assert ("copied", report.copied_nbytes) in said[1:]
    assert all(path.stat().st_nlink == 1 for path in new.iterdir())
    assert samples_of(new) == [i for i in range(25) if i % 7 != 1]


def test_a_filesystem_that_clones_is_asked_to(out: Path, new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ioctl(descriptor: int, request: int, source: int) -> int:
        assert request == 0x40049409
        os.sendfile(descriptor, source, 0, os.fstat(source).st_size)
        return 0

    monkeypatch.setattr(files.fcntl, "ioctl", ioctl)
    report = change(out, new, keep=Selection(classes="c1"), copy=True)
    assert report.cloned_nbytes > 0
    assert (report.copied_nbytes, report.linked_nbytes) == (0, 0)
    assert verify(new).ok


def test_too_little_room_for_copies_is_told_before_anything_is_copied(
    out: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, 100))  # type: ignore[attr-defined]
    with pytest.raises(SpaceError, match=r"bytes of free space, found 100 bytes"):
        change(out, new, drop=Selection(classes="c1"), copy=True)
    assert not new.exists()
    assert left_beside(new.parent) == []


@pytest.mark.parametrize(
    ("file", "place"),
    [
        *(("train-00001.npy", -1), ("train-00001.npy", 20)),
        *((file, -1) for file in ("train-index.npy", "train-order-0.npy", "train-clip-crc32.npy")),
    ],
)
def test_a_file_that_is_damaged_or_that_opening_would_refuse_makes_no_set(
    file: str, place: int, make_set: Callable[..., Path], new: Path
) -> None:
    """Where shards become links, so that no file is copied, all tables are compared with their checksums."""
    out = make_set(25)
    change_split(out, some_arrays(25, 6, 5), np.arange(25)[::-1].copy())
    flip(out / file, place)
    with pytest.raises(FormatError, match=f"{file}: (sha256|header): expected"):
        change(out, new, labels={key(1): "c0"}, copy=file == "train-00001.npy")
    assert not new.exists()
    assert left_beside(new.parent) == []


def test_the_set_that_is_damaged_is_named_and_no_other(out: Path, new: Path, make_set: Callable[..., Path]) -> None:
    damaged = make_set(12)
    flip(damaged / "train-00001.npy")
    with pytest.raises(FormatError, match=f"`shardio verify {damaged}`"):
        merge([out, damaged], new, same_keys="allow", same_images="keep", copy=True)


def test_a_repair_of_one_set_replaces_its_file_and_writes_to_none_of_another(
    image_tree: Path, tmp_path: Path, new: Path
) -> None:
    out = tmp_path / "out"
    convert(image_tree, out, size=16, workers=1)
    before = contents(out)
    keep(out, new, classes="n01")
    flip(new / "train-00000.npy")  # one file of both sets
    damaged = (new / "train-00000.npy").read_bytes()
    repair(out, image_tree, workers=1)
    assert contents(out) == before
    assert (new / "train-00000.npy").read_bytes() == damaged
    assert not (new / "train-00000.npy").samefile(out / "train-00000.npy")
    with pytest.raises(ConvertError, match="found one that 'change' made from another set: repair the other"):
        repair(new, image_tree, workers=1)


def test_a_set_of_links_is_published_as_a_copy_and_moved_only_if_no_permissions_change(
    out: Path, new: Path, tmp_path: Path
) -> None:
    keep(out, new, classes="c1")
    modes = {path.name: path.stat().st_mode for path in out.iterdir()}
    (tmp_path / "root").mkdir()
    publish(new, tmp_path / "root" / "copy")
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "root" / "copy").iterdir())
    before = os.umask(0o077)
    try:
        with pytest.raises(ConvertError, match="hard link"):
            publish(new, tmp_path / "root" / "moved", move=True)
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode for path in out.iterdir()} == modes
    publish(new, tmp_path / "root" / "moved", move=True)
    assert samples_of(tmp_path / "root" / "moved") == [1, 8, 15, 22]


# --- where the new set goes ------------------------------------------------------------------------------------------


def test_nothing_is_made_over_anything_nor_inside_the_old_set(out: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for target, told in (
        (tmp_path / "there", "expected nothing there"),
        (out, "expected nothing there"),
        (out / "inside", "outside of the set"),
    ):
        with pytest.raises(ConvertError, match=told):
            change(out, target, drop=Selection(classes="c1"))
    with pytest.raises(SetNotFoundError):
        keep(tmp_path / "there", tmp_path / "new", classes="c1")
    assert os.listdir(tmp_path / "there") == []


def test_the_provenance_names_parents_and_arguments_and_no_path(out: Path, tmp_path: Path, new: Path) -> None:
    np.save(tmp_path / "clip.npy", np.zeros((25, 2), "<f4"))
    change(out, tmp_path / "a", arrays={"clip": tmp_path / "clip.npy"})
    conditions = {"classes": "c1", "keys": "c1/*", "where": "label < 5"}
    keep(tmp_path / "a", new, **conditions)
    provenance = load_manifest(new).provenance
    assert provenance["change"] == {
        "operation": "change",
        "arguments": {"keep": {"classes": ["c1"], "keys": ["c1/*"], "where": ["label < 5"]}},
        "parents": [load_manifest(tmp_path / "a").digest],
    }
    (earlier,) = provenance["earlier"]
    assert earlier["arguments"] == {"arrays": {"clip": {"kind": "array", "dtype": "<f4", "shape": [2]}}}
    assert earlier["parents"] == [load_manifest(out).digest]
    assert str(tmp_path) not in json.dumps(provenance)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(tmp_path / "a", elsewhere / "b")
    keep(elsewhere / "b", elsewhere / "new", **conditions)
    assert contents(elsewhere / "new") == contents(new)


def test_the_steps_of_one_call_come_in_their_order(out: Path, new: Path) -> None:
    """Labels and arrays are of the samples that are kept, and classes are counted after the labels."""
    chosen = [24, 3, 10]
    with pytest.raises(SourceError, match="1 of 2 keys belong to no sample"):
        change(out, new, keep=Selection(indices=chosen), labels={key(3): "c0", key(4): "c0"})
    report = change(
        out,
        new,
        keep=Selection(indices=chosen),
        labels={key(3): "c0"},
        classes="used",
        arrays={"a": np.arange(3)},
        array_keys=[key(10), key(3), key(24)],
    )
    assert samples_of(new) == chosen
    assert report.classes == ("c0", "c3")
    assert open_shards(new).labels.tolist() == [1, 0, 1]
    assert array_of(new, "a").tolist() == [2, 1, 0]


# --- keep and drop ---------------------------------------------------------------------------------------------------


def test_a_selection_of_a_selection_refers_to_the_stored_rows(out: Path, tmp_path: Path) -> None:
    keep(out, tmp_path / "a", indices=[20, 3, 7, 21, 1])
    keep(tmp_path / "a", tmp_path / "b", indices=[4, 0, 0, 3])
    assert samples_of(tmp_path / "b") == [1, 20, 20, 21]
    split = load_manifest(tmp_path / "b").splits["train"]
    assert [shard.num_samples for shard in split.shards] == [10, 5]  # no row of the second shard is left
    assert np.load(tmp_path / "b" / "train-order-0.npy").tolist() == [1, 10, 10, 11]


def test_whole_shards_in_their_order_need_no_order(out: Path, tmp_path: Path) -> None:
    keep(out, tmp_path / "a", indices=np.arange(10, 25))
    manifest = load_manifest(tmp_path / "a")
    assert not manifest.splits["train"].orders
    assert [shard.num_samples for shard in manifest.splits["train"].shards] == [10, 5]
    keep(out, tmp_path / "b", indices=np.arange(25)[::-1])
    keep(tmp_path / "b", tmp_path / "c", indices=np.arange(25)[::-1])
    assert load_manifest(tmp_path / "b").splits["train"].orders
    assert load_manifest(tmp_path / "c").digest == load_manifest(out).digest
    merge([tmp_path / "a", out], tmp_path / "d", same_keys="allow", same_images="keep")
    assert not load_manifest(tmp_path / "d").splits["train"].orders


def test_a_merge_of_sets_that_share_shards_has_each_once_if_it_needs_an_order(
    make_set: Callable[..., Path], tmp_path: Path
) -> None:
    out = make_set(25)
    change(out, tmp_path / "clip", arrays={"clip": np.arange(75.0).reshape(25, 3)})
    keep(tmp_path / "clip", tmp_path / "a", indices=[24, 3])
    keep(tmp_path / "clip", tmp_path / "b", indices=[0, 4])
    for name, sets, expected in (("some", "ab", [24, 3, 0, 4]), ("whole", ("a", "clip"), [24, 3, *range(25)])):
        merge([tmp_path / one for one in sets], tmp_path / name, same_keys="allow", same_images="keep")
        assert samples_of(tmp_path / name) == expected
        values = open_shards(tmp_path / name).values_of("clip", np.arange(len(expected)))
        assert values[:, 0].tolist() == [3 * sample for sample in expected]
        split = load_manifest(tmp_path / name).splits["train"]
        for shards in (split.shards, split.arrays["clip"].shards):
            assert len({shard.sha256 for shard in shards}) == len(shards) <= 3
        assert verify(tmp_path / name).ok


def test_arrays_whose_samples_are_stored_alike_share_an_order(make_set: Callable[..., Path], new: Path) -> None:
    out = make_set(25)
    change_split(out, given := some_arrays(25, 6, 5))
    keep(out, new, indices=[24, 3, 3, 11, 0])
    assert np.array_equal(array_of(new, "clip"), given["clip"][1][[24, 3, 3, 11, 0]])
    # The shards of arrays hold seven rows and the shards of pixels ten.
    assert len(open_shards(new).orders) == 2
    assert verify(new).ok


def test_splits_that_are_not_named_stay_and_a_split_can_be_dropped(tmp_path: Path, new: Path) -> None:
    out = tmp_path / "two"
    with ShardWriter(out, SHAPE, classes=["c0", "c1"]) as writer:
        for i in range(12):
            split = "train" if i < 8 else "val"
            writer.append(sample_pixels(i, SHAPE), i % 2, split=split, key=f"c{i % 2}/{i}.png")
    change(out, new, keep=Selection(classes="c1"), split="train")
    assert samples_of(new) == [1, 3, 5, 7]
    assert samples_of(new, "val") == [8, 9, 10, 11]
    change(out, tmp_path / "train alone", drop=Selection(), split="val")
    assert list(load_manifest(tmp_path / "train alone").splits) == ["train"]
    for options, error, told in (
        ({"keep": Selection(keys="c1/3.png")}, ConvertError, r"split 'val': no sample is left.*--split"),
        ({"drop": Selection(), "split": ["train", "val"]}, ConvertError, "no sample is left in any split"),
        ({"keep": Selection(indices=[1])}, ConvertError, "indices.*one split, found 2 splits .train, val"),
        ({"keep": Selection(indices=[1]), "split": "test"}, SetNotFoundError, "expected a split 'test', found train"),
        ({"drop": Selection(), "split": "val", "arrays": {"a": [1]}}, ConvertError, "into one split, found none"),
        ({"keep": Selection(keys="*"), "array_keys": ["c1/3.png"]}, ValueError, "no arrays were given"),
        ({"keep": Selection(keys="*"), "drop": Selection(keys="*")}, ValueError, "not both"),
        ({"keep": Selection()}, ValueError, "selection has no condition"),
        ({"keep": Selection(where="label > 5")}, ConvertError, "no sample is left"),
        ({"keep": Selection(listed=["c0/0.png", "no"])}, ConvertError, "1 of 2 listed keys belong to no sample: 'no'"),
    ):
        with pytest.raises(error, match=told):
            change(out, tmp_path / "x", **options)  # type: ignore[arg-type]
        assert not (tmp_path / "x").exists()


# --- arrays ----------------------------------------------------------------------------------------------------------


def array_of(folder: Path, name: str, split: str = "train") -> NDArray[Any]:
    opened = open_shards(folder, split)
    row = opened.array(name).row
    found = np.empty((len(opened), *row.shape), row.dtype)
    opened.gather_array(name, np.arange(len(opened)), found)
    return found


@pytest.mark.parametrize(
    "how", ["file", "array", "blocks", "fortran", "fortran file", "keys", "keys in lines", "file, keys in lines"]
)
def test_an_array_has_the_value_of_each_sample(
    how: str, out: Path, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carry, "ARRAY_SHARD_NBYTES", HEADER_NBYTES + 7 * 24)
    values = np.random.default_rng(0).standard_normal((25, 2, 3)).astype("<f4")
    given: Any = values
    by: Any = None
    if "keys" in how:
        other = np.random.default_rng(1).permutation(25)
        given = np.concatenate([values[other], values[:1]])
        by = [*(key(i) for i in other), "another"]
    if "fortran" in how:
        given = np.asfortranarray(given)
    if "blocks" in how:
        given = (values[i : i + count] for i in range(0, 25, 4) for count in (0, 4))  # a block may be empty
    if "file" in how:
        np.save(tmp_path / "values.npy", given)
        given = tmp_path / "values.npy"
    if "lines" in how:
        (tmp_path / "keys.txt").write_text("\n".join(by))
        by = tmp_path / "keys.txt"
    report = change(out, new, arrays={"clip": given}, array_keys=by)
    assert np.array_equal(array_of(new, "clip"), values)
    assert len(load_manifest(new).splits["train"].arrays["clip"].shards) == 4
    assert samples_of(new) == list(range(25))
    assert verify(new).ok
    assert report.linked_nbytes >= sum(path.stat().st_size for path in out.glob("*.npy"))


def test_an_array_replaces_the_one_of_its_name_and_no_other(make_set: Callable[..., Path], new: Path) -> None:
    out, given = make_set(25), some_arrays(25, 6, 5)
    change_split(out, given)
    change(out, new, arrays={"clip": np.arange(25)})
    assert array_of(new, "clip").tolist() == list(range(25))
    assert np.array_equal(array_of(new, "mask"), given["mask"][1])


@pytest.mark.parametrize(
    ("arrays", "options", "told"),
    [
        ({"a": np.zeros(24)}, {}, r"array 'a': .* 25 samples, found 24 rows; .*`--array-keys`"),
        ({"a": np.zeros(25, ">f4")}, {}, r"array.astype\('<f4'\)"),
        ({"a": np.full(25, 2, np.uint8).view(bool)}, {}, "array 'a': expected bytes of 0 or 1 for bool, found 2"),
        ({"a": np.zeros(())}, {}, "expected a row for each"),
        ({"a": np.zeros(25)}, {"kinds": {"a": "mask"}}, "a mask must have"),
        ({"a": np.zeros(25)}, {"kinds": {"b": "mask"}}, "kinds must name arrays"),
        ({"label": np.zeros(25)}, {}, "an array's name .*found 'label'"),
        ({"a": np.zeros(25), "A": np.zeros(25)}, {}, "differ in more than case"),
        ({}, {}, "at least one array"),
        ({"a": []}, {}, "expected at least one block of values, found none"),
        ({"a": [np.zeros(20)]}, {}, r"'a': expected .*25 samples .*'train'.* found 20 rows"),
        ({"a": [np.zeros(20), np.zeros(20)]}, {}, "found more"),
        ({"a": [np.zeros(20), np.zeros(5, "f4")]}, {}, "expected only rows of <f8"),
        ({"a": [np.zeros(20), 5]}, {}, "expected NumPy arrays, found int"),
        ({"a": [1, 2]}, {}, "expected NumPy arrays, found int"),
        ({"a": np.zeros(25)}, {"array_keys": [*KEYS[:24], "x"]}, "found none for 1 of 25 samples: 'c3/24.png'"),
        ({"a": np.zeros(25)}, {"array_keys": [*KEYS[:24], KEYS[0]]}, "found 1 repeated keys: 'c0/0.png'"),
        ({"a": np.zeros(25)}, {"array_keys": [*KEYS, "x"]}, "a row for each of the 26 keys, found 25"),
        ({"a": [np.zeros(25)]}, {"array_keys": KEYS}, "leave `array_keys` out"),
    ],
)
def test_what_cannot_be_an_array_is_told_and_makes_nothing(
    arrays: dict[str, Any], options: dict[str, Any], told: str, out: Path, new: Path
) -> None:
    with pytest.raises((ShardioError, ValueError), match=told):
        change(out, new, arrays=arrays, **options)
    assert not new.exists()
    assert left_beside(new.parent) == []


def test_an_array_cannot_have_the_name_of_another_splits_files(tmp_path: Path, new: Path) -> None:
    with ShardWriter(tmp_path / "out", SHAPE) as writer:
        for split in ("train", "Train-Val"):
            writer.append(sample_pixels(0, SHAPE), 0, split=split)
    with pytest.raises(ConvertError, match=r"array 'val'.*of the split 'train'.*of the split 'Train-Val'"):
        change(tmp_path / "out", new, arrays={"val": np.zeros(1)}, split="train")
    change(tmp_path / "out", new, arrays={"value": np.zeros(1)}, split="train")


# --- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["mapping", "csv", "parquet", "numbers"])
def test_samples_get_the_labels_of_their_keys(how: str, out: Path, new: Path, tmp_path: Path) -> None:
    labels: Any = {key(3): "c0", key(10): "c6"}
    if how == "csv":
        text = "extra, key ,label\n1,c3/3.png, c0\n\n2,c3/10.png,6\n"
        (tmp_path / "labels.csv").write_text(text, encoding="utf-8-sig")
        labels = tmp_path / "labels.csv"
    elif how in ("parquet", "numbers"):
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        column = [0, 6] if how == "numbers" else pa.array(["c0", "c6"]).dictionary_encode()
        labels = tmp_path / "labels.parquet"
        pq.write_table(pa.table({"path": [key(3), key(10)], "label": column}), labels)
    report = change(out, new, labels=labels)
    expected = [i % 7 for i in range(25)]
    expected[3], expected[10] = 0, 6
    assert open_shards(new).labels.tolist() == expected
    assert samples_of(new) == list(range(25))
    assert report.notes == {"num_relabeled": {"train": 2}, "new_classes": []}


def test_new_classes_come_after_the_others_or_as_they_are_listed(out: Path, new: Path, tmp_path: Path) -> None:
    labels = {key(3): "wolf", key(4): "dog", key(5): "wolf"}
    report = change(out, new, labels=labels, classes="new")
    assert report.classes == (*(f"c{i}" for i in range(7)), "dog", "wolf")
    assert report.notes == {"num_relabeled": {"train": 3}, "new_classes": ["dog", "wolf"]}
    listed = ["wolf", "dog", *(f"c{i}" for i in range(6, -1, -1))]
    report = change(out, tmp_path / "listed", labels=labels, classes=listed)
    assert report.notes["num_relabeled"] == {"train": 3}
    one, two = open_shards(new), open_shards(tmp_path / "listed")
    assert two.classes == tuple(listed)
    assert [one.classes[i] for i in one.labels] == [two.classes[i] for i in two.labels]
    for classes, error, told in (
        (None, SourceError, r"found 'wolf'.*--classes new"),
        ("used", SourceError, r"found 'wolf'.*--classes new"),
        ("none", ValueError, "'used', 'new' or a list"),
        (["wolf", "dog"], ConvertError, "have classes that are not listed, such as 'c0'"),
        (["dog", "dog"], ValueError, "found 'dog' twice"),
    ):
        with pytest.raises(error, match=told):
            change(out, tmp_path / "x", labels=labels, classes=classes)


def test_names_for_people_are_taken_if_they_are_of_one_class(tmp_path: Path, new: Path) -> None:
    names = ["crane", "crane", "dog"]
    with ShardWriter(tmp_path / "out", SHAPE, classes=["n1", "n2", "n3"], class_names=names) as writer:
        for i in range(3):
            writer.append(sample_pixels(i, SHAPE), i, key=f"{i}")
    change(tmp_path / "out", new, labels={"0": "dog", "1": "cat"}, classes="new")
    assert open_shards(new).labels.tolist() == [2, 3, 2]
    assert open_shards(new).class_names == (*names, "cat")
    with pytest.raises(SourceError, match="'crane' is the name of several classes: choose one of n1, n2"):
        change(tmp_path / "out", tmp_path / "x", labels={"0": "crane"})


def test_a_text_is_never_the_number_of_a_class_where_names_are_numbers(tmp_path: Path, new: Path) -> None:
    names = ["1", "10", "2", "cat", "cat "]
    with ShardWriter(tmp_path / "out", SHAPE, classes=names) as writer:
        for i in range(5):
            writer.append(sample_pixels(i, SHAPE), i, key=f"{i}")
    labels = {"0": "10", "1": " 2", "2": "1", "3": "cat ", "4": "cat\t"}
    change(tmp_path / "out", new, labels=labels)
    assert open_shards(new).labels.tolist() == [1, 2, 0, 4, 3]
    change(tmp_path / "out", tmp_path / "more", labels={"0": "3", "1": "cow "}, classes="new")
    assert open_shards(tmp_path / "more").classes == (*names, "3", "cow")
    for label in ("0", "3"):
        with pytest.raises(SourceError, match=f"labels: '0'.* by name, .*found '{label}'"):
            change(tmp_path / "out", tmp_path / "x", labels={"0": label})
        with pytest.raises(ValueError, match=f"by name, .*found '{label}'"):
            change(tmp_path / "out", tmp_path / "x", keep=Selection(classes=label))
    (tmp_path / "l.csv").write_text("key,path,label\n3,0,cat \n3,0,cat \n1,0,cat\n1,0,cat\t\n")
    change(tmp_path / "out", tmp_path / "keys", labels=tmp_path / "l.csv")
    assert open_shards(tmp_path / "keys").labels.tolist() == [0, 3, 2, 4, 4]
    change(tmp_path / "out", tmp_path / "third", keep=Selection(classes=3))
    assert open_shards(tmp_path / "third").labels.tolist() == [3]


@pytest.mark.parametrize("label", ["0", "7", "1.0"])
def test_a_new_class_with_the_name_of_a_number_has_to_be_listed(label: str, out: Path, new: Path) -> None:
    with pytest.raises(SourceError, match=f"labels: '{label}' may be the number of a class"):
        change(out, new, labels={key(3): label}, classes="new")
    change(out, new, labels={key(3): label}, classes=[*(f"c{i}" for i in range(7)), label])
    assert open_shards(new).labels[3] == 7


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "column 'key'.*, found no header"),
        (b"key,label,class\nc0/0.png,0,c0\n", "one column 'label' or 'class', found key, label, class: remove"),
        (b"key,label\nc0/0.png, \n", "'c0/0.png': expected a class, found an empty"),
        (b"key,label\n", "at least one row"),
        (b"key,klass\na,b\n", "column 'label'.*, found key, klass"),
        (b"key,key,label\na,b,c\n", "expected one column 'key' or 'path', found key, key"),
        (b"key,label\na\n", "line 2: expected 2 cells.* found 1 cells"),
        (b"key,label\nc0/0.png,c1\nc0/0.png,c2\n", "line 3: expected one label for 'c0/0.png', found 'c1' and 'c2'"),
        (b"key,label\nno,c1\n", "1 of 1 keys belong to no sample: 'no'"),
        (b"key,label\nc0/0.png,7\n", "from 0 to 6, found '7'"),
        (b'key,label\n"c0', "unexpected end of data"),
        (b"PAR1xxxx", "damaged, or no parquet file"),
    ],
)
def test_tables_that_are_no_labels_are_refused_with_the_place(
    text: bytes, told: str, out: Path, new: Path, tmp_path: Path
) -> None:
    (tmp_path / "labels").write_bytes(text)
    with pytest.raises(SourceError, match=f"{re.escape(str(tmp_path / 'labels'))}.*{told}"):
        change(out, new, labels=tmp_path / "labels")
    assert not new.exists()


# --- merge -----------------------------------------------------------------------------------------------------------


def write_set(folder: Path, samples: Mapping[int, str], classes: list[str], **options: Any) -> Path:
    with ShardWriter(folder, SHAPE, classes=classes, **options) as writer:
        for i, label in samples.items():
            numbers = dict.fromkeys(options.get("arrays", {}), i)
            writer.append(sample_pixels(i, SHAPE), classes.index(label), key=f"{label}/{i}.png", **numbers)
    return folder


def test_classes_are_united_by_name(tmp_path: Path, new: Path) -> None:
    a = write_set(tmp_path / "a", {0: "cat", 1: "dog"}, ["cat", "dog"])
    b = write_set(tmp_path / "b", {2: "elephant" * 9, 3: "dog"}, ["dog", "elephant" * 9], class_names=["Dog", "E"])
    report = merge([a, b], new)
    opened = open_shards(new)
    assert opened.classes == report.classes == ("cat", "dog", "elephant" * 9)
    assert opened.class_names == ("cat", "Dog", "E")
    assert opened.labels.tolist() == [0, 1, 2, 1]
    assert samples_of(new) == [0, 1, 2, 3]
    assert verify(new).ok
    assert [path.name for path in sorted(new.glob("train-0*"))] == ["train-00000.npy", "train-00001.npy"]


def test_a_key_of_several_samples_gives_no_label_or_row_but_a_repeated_sample_gets_it(
    tmp_path: Path, new: Path
) -> None:
    for i, name in enumerate("ab"):
        with ShardWriter(tmp_path / name, SHAPE) as writer:  # keys are numbers in the split
            for split in ("train", "val"):
                writer.append(sample_pixels(i + 2 * len(split), SHAPE), 7, split=split)
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both", same_keys="allow")
    rows = {"arrays": {"clip": np.zeros((1, 2))}, "array_keys": ["0"], "split": "val"}
    for folder, given, told in (
        ("a", {"labels": {"0": 1}}, "'0': .*different samples of train and val: choose one by"),
        ("both", {"labels": {"0": 1}, "split": "val"}, "'0': .*different samples of val: give labels before a merge"),
        ("both", rows, "different samples with the key '0'"),
    ):
        with pytest.raises(SourceError, match=told):
            change(tmp_path / folder, new, **given)
    change(tmp_path / "a", new, keep=Selection(indices=[0, 0]), labels={"0": 1}, **{**rows, "split": "train"})
    assert (open_shards(new).labels.tolist(), open_shards(new, "val").labels.tolist()) == ([1, 1], [7])


def test_numbers_as_names_of_classes_that_mean_other_things_are_not_united(tmp_path: Path, new: Path) -> None:
    for i, (name, kinds) in enumerate({"a": ["cat", "dog"], "b": ["dog", "cat"], "c": ["cat", "dog"]}.items()):
        write_set(tmp_path / name, {i: "1"}, ["0", "1"], class_names=kinds)
    with pytest.raises(ConvertError, match=r"b: expected 'cat' as the readable name of the class '0'.*found 'dog'"):
        merge([tmp_path / "a", tmp_path / "b"], new)
    merge([tmp_path / "a", tmp_path / "c"], new)
    assert open_shards(new).class_names == ("cat", "dog")


def test_sets_without_pixels_and_without_a_common_array_are_not_merged(tmp_path: Path, new: Path) -> None:
    for dtype in ("float32", "float64"):
        with ShardWriter(tmp_path / dtype, None, arrays={"z": ("array", dtype, ())}) as writer:
            writer.append(label=0, key=dtype, z=np.zeros((), dtype))
    with pytest.raises(
        ConvertError, match=r"split 'train': expected an array that is the same in .*float32, .*float64"
    ):
        merge([tmp_path / "float32", tmp_path / "float64"], new, only_common=True)


def test_splits_whose_names_differ_only_in_case_are_not_merged(tmp_path: Path, new: Path) -> None:
    for i, split in enumerate(("train", "Train")):
        with ShardWriter(tmp_path / str(i), SHAPE) as writer:
            writer.append(sample_pixels(i, SHAPE), i, split=split)
    with pytest.raises(ConvertError, match="'train' and 'Train': names must differ in more than case"):
        merge([tmp_path / "0", tmp_path / "1"], new)


def test_vectors_with_a_number_for_each_class_do_not_get_other_classes(tmp_path: Path, new: Path) -> None:
    for name, classes in (("a", ["cat", "dog"]), ("b", ["dog", "cat"]), ("more", ["cat", "dog", "emu"])):
        with ShardWriter(tmp_path / name, SHAPE, labels=("float32", len(classes)), classes=classes) as writer:
            writer.append(np.full(SHAPE, len(name) + ord(name[0]), np.uint8), np.eye(len(classes))[0], key=name)
    a = tmp_path / "a"
    for refused in (
        lambda: merge([a, tmp_path / "b"], new),
        lambda: merge([a, tmp_path / "b"], new, only_common=True),
        lambda: change(a, new, classes=["dog", "cat"]),
        lambda: change(a, new, classes="used"),
    ):
        with pytest.raises(ConvertError, match=r"split 'train': labels are vectors.*--array labels"):
            refused()
    change(a, new, classes=["dog", "cat"], arrays={"labels": np.array([[0, 1]], np.float32)})
    merge([new, tmp_path / "b"], tmp_path / "both", same_keys="allow")
    assert open_shards(tmp_path / "both").values_of("labels", np.arange(2)).tolist() == [[0, 1], [1, 0]]
    merge([a, tmp_path / "more"], tmp_path / "none", only_common=True)
    assert open_shards(tmp_path / "none").classes == ("cat", "dog", "emu")
    change(a, tmp_path / "numbers", labels={"a": "emu"}, classes="new")
    assert open_shards(tmp_path / "numbers").labels.tolist() == [2]


def test_sets_that_do_not_go_together_are_refused_with_the_way_out(tmp_path: Path, new: Path) -> None:
    a = write_set(tmp_path / "a", {0: "cat"}, ["cat"])
    year = write_set(tmp_path / "year", {1: "cat"}, ["cat"], arrays={"year": ("array", "int64", ())})
    change(a, tmp_path / "clip", arrays={"clip": np.zeros((1, 2))})
    with ShardWriter(tmp_path / "large", (7, 5, 3), classes=["cat"]) as writer:
        writer.append(np.zeros((7, 5, 3), np.uint8), 0)
    with ShardWriter(tmp_path / "bare", SHAPE) as writer:
        writer.append(sample_pixels(5, SHAPE), 12345, key="5")
    write_set(tmp_path / "squashed", {6: "cat"}, ["cat"], squashed=True)
    assert "train   1 sample in 1 shard, squashed\n" in shardio("info", tmp_path / "squashed").stdout
    for other, told in (
        (make_halved_set(tmp_path / "half", 2), r"half: expected samples stored as rgb, as in .*a, .*--pixels rgb"),
        (tmp_path / "squashed", "split 'train'.*squashed.*--fit"),
        (a, r"1 keys occur more than once: 'cat/0.png'.*--same-keys allow"),
        (year, r"the same arrays.* found none in .*a, and year \(array of <i8 \(\)\) in .*year: `--only-common`"),
        (tmp_path / "clip", r"the same arrays.* found none in .*a, and clip \(array of <f8 \(2,\)\)"),
        (tmp_path / "large", r"large: expected samples of \(6, 5, 3\), as in .*a, found samples of \(7, 5, 3\)"),
        (tmp_path / "bare", "bare: .* no class names"),
    ):
        with pytest.raises(ConvertError, match=told):
            merge([a, other], new)
        assert not new.exists()
    for given in (a, []):
        with pytest.raises(ValueError, match="sets must be a list"):
            merge(given, new)  # type: ignore[arg-type]
    report = merge([a, year, tmp_path / "clip"], new, only_common=True, same_keys="allow", same_images="keep")
    assert report.notes == {"left_out": ["train/year", "train/clip"]}
    said = shardio("merge", a, year, tmp_path / "said", "--only-common").stdout
    assert "  left out, as it is not the same in all sets: train/year\n" in said
    assert keys_of(new) == ["cat/0.png", "cat/1.png", "cat/0.png"]
    merge([tmp_path / "bare", tmp_path / "bare"], tmp_path / "numbers", same_keys="allow", same_images="keep")
    assert open_shards(tmp_path / "numbers").labels.tolist() == [12345, 12345]


def test_a_sample_of_another_set_with_the_same_pixels_is_refused_wherever_it_is_unless_it_is_to_be_kept(
    tmp_path: Path, new: Path
) -> None:
    a = write_set(tmp_path / "a", dict.fromkeys(range(6), "cat"), ["cat"], shard_nbytes=HEADER_NBYTES + 200)
    with ShardWriter(tmp_path / "b", SHAPE, classes=["cat"]) as writer:
        for sample in (7, 2, 2, 5):
            size = (60 + sample, 50)  # of another source, such as what `extract` has written
            writer.append(sample_pixels(sample, SHAPE), 0, key=f"again/{sample}", split="val", source_size=size)
    keep(a, tmp_path / "turned", indices=[5, 4, 3, 2])
    for first in (a, tmp_path / "turned"):
        with pytest.raises(ConvertError, match=r"3 images.*'again/2' of \S*b equals 'cat/2.png' of"):
            merge([first, tmp_path / "b"], new, same_keys="allow")
    assert os.listdir(tmp_path).count("new") == 0
    merge([a, tmp_path / "b"], new, same_images="keep")
    assert len(open_shards(new, "val")) == 4
    merge([tmp_path / "b"], tmp_path / "one")  # in which pictures repeat, as they did before
    with pytest.raises(ValueError, match="same_images"):
        merge([a], new, same_images="allow")  # type: ignore[arg-type]


def test_pixels_that_have_one_checksum_and_differ_are_not_the_same_image(tmp_path: Path, new: Path) -> None:
    pixels = sample_pixels(0, SHAPE)
    other = pixels.copy()
    # What the generator polynomial of crc32 divides changes no checksum.
    other.reshape(-1)[:5] ^= np.packbits([int(bit) for bit in f"{0x104C11DB7:b}"], bitorder="little")
    for name, image in (("a", pixels), ("b", other)):
        with ShardWriter(tmp_path / name, SHAPE) as writer:
            writer.append(image, 0, key=name)
    merge([tmp_path / "a", tmp_path / "b"], new)
    index = open_shards(new).index
    assert index["crc32"][0] == index["crc32"][1]


def test_more_same_images_than_are_worth_reading_are_counted_up_to_there(
    tmp_path: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio.changes.merge._MOST_COMPARED", 3)
    for name in "ab":
        with ShardWriter(tmp_path / name, SHAPE) as writer:
            for i in range(9):
                writer.append(sample_pixels(i % 4, SHAPE), 0, key=f"{name}/{i}")
    with pytest.raises(ConvertError, match="3 images or more"):
        merge([tmp_path / "a", tmp_path / "b"], new)


def test_rejects_of_all_sets_are_those_of_the_merged_one(image_tree: Path, tmp_path: Path, new: Path) -> None:
    (image_tree / "train" / "n01" / "broken.JPEG").write_bytes(b"")
    for name in ("a", "b"):
        convert(image_tree, tmp_path / name, size=16, max_bad=1, workers=1)
    merge([tmp_path / "a", tmp_path / "b"], new, same_keys="allow", same_images="keep")
    assert load_manifest(new).num_rejects == 2
    assert (new / "rejects.jsonl").read_bytes() == 2 * (tmp_path / "a" / "rejects.jsonl").read_bytes()


# --- the command line ------------------------------------------------------------------------------------------------


def test_every_change_is_a_command(image_tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(image_tree, out, size=16, workers=1)
    np.save(tmp_path / "clip.npy", np.zeros((12, 3), "<f2"))
    np.save(tmp_path / "mask.npy", np.zeros((12, 16, 16), np.uint8))
    (tmp_path / "labels.csv").write_text("key,label\ntrain/n01/n01_0.JPEG,wolf\n")
    (tmp_path / "some.txt").write_text("train/n01/n01_0.JPEG\n")
    (tmp_path / "classes.txt").write_text("wolf\nn03\nn02\nn01\n")

    def run(*words: object, told: str, code: int = 0) -> None:
        result = shardio(*words, cwd=tmp_path)
        assert result.returncode == code, result.stderr
        assert told in result.stdout, result.stdout

    arrays = ("--array", "clip=clip.npy", "--array", "seg:mask=mask.npy", "--split", "train")
    run("change", out, "a", *arrays, told="made ")
    run("change", "a", "b", "--keep", "--class", "n01", "--classes", "used", told="4 samples")
    run("change", "a", "c", "--drop", "--list", "some.txt", "--split", "train", told="11 samples")

    run("change", "a", "r", "--keep", "--random", "50%", "--seed", "1", "--where", "label < 2", told="4 samples")
    run("change", "a", "d", "--labels", "labels.csv", "--classes", "new", told="4 classes, 1 of them new: wolf")
    run("change", "a", "d2", "--labels", "labels.csv", "--classes", "classes.txt", told="1 sample relabeled")
    run("merge", "a", "d", "e", "--same-keys", "allow", "--same-images", "keep", told="24 samples")
    run("merge", out, "f", told="made ")
    run("info", "e", "-v", told="  change.operation: merge")
    run("change", "a", "g", "--keep", "--class", "n01", "--json", told='"num_files": 11')
    for words, code, told in (
        (("change", out, "x", "--array", "clip"), 2, "expected NAME=FILE.npy"),
        (("change", out, "x", "--array", "clip=clip.npy"), 1, "arrays go into one split, found train, val"),
        (("change", out, "x"), 2, "expected a change"),
        (("change", out, "x", "--class", "n01"), 2, "need --keep or --drop"),
        (("change", out, "x", "--keep"), 2, "selection has no condition"),
        (("change", out, "x", "--labels", "labels.csv"), 1, "--classes new"),
        (("merge", out, out, "x"), 1, "--same-keys allow"),
    ):
        assert_one_clear_error(shardio(*words, cwd=tmp_path), code, told)


def test_names_of_files_in_a_parent_may_be_any(make_set: Callable[..., Path], new: Path) -> None:
    out = make_set(25)
    manifest = load_manifest(out)
    split = manifest.splits["train"]
    shards = tuple(replace(shard, file=f"x{i}") for i, shard in enumerate(split.shards))
    for shard, named in zip(split.shards, shards, strict=True):
        (out / shard.file).rename(out / named.file)
    commit_manifest(out, replace(manifest, splits={"train": replace(split, shards=shards)}))
    keep(out, new, indices=[24, 3])
    assert samples_of(new) == [24, 3]
    assert {path.name for path in new.glob("train-0*")} == {"train-00000.npy", "train-00001.npy"}
