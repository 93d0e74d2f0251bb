"""What every kind of source does alike: one small collection in each kind of storage, and what becomes of it."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conversions import Interrupt, rejects
from folders import everything, flip, hashes, put
from numpy.typing import NDArray
from pictures import random_picture, write_jpeg
from storages import (
    CLASSES,
    WORDS,
    draw_imagenet,
    images_of,
    scan,
    tar_of,
    write_archives,
    write_kaggle,
    write_list,
    write_parquet,
    write_webdataset,
)

from shardio.conversion.collect import collect
from shardio.conversion.convert import convert
from shardio.conversion.estimate import estimate
from shardio.conversion.options import ConvertOptions
from shardio.conversion.repair import repair
from shardio.conversion.sources.collection import Collection, DatasetItem, Fault, Source
from shardio.conversion.sources.datasets import list_datasets
from shardio.conversion.sources.table import Table
from shardio.errors import ConvertError, SourceError
from shardio.reading.shardset import open_shards
from shardio.sets.verify import verify

OPTIONS: dict[str, Any] = {"shard_size": 4096 + 5 * 8 * 8 * 3, "workers": 1}

Expected = dict[str, dict[str, tuple[int | None, Path]]]
"""For each split the label of each sample, and the picture that it is or was made from, by key."""


def of_tree(tree: Path, rename: Callable[[Path], str] | None = None, *, labeled: bool = True) -> Expected:
    """The samples of the tree, whose keys are the paths of their files, or what `rename` makes of them."""
    rename = rename or (lambda path: str(path.relative_to(tree)))
    return {
        split: {rename(path): (label_of(path) if labeled else None, path) for path in images_of(tree, split)}
        for split in ("train", "val")
    }


def label_of(path: Path) -> int:
    return CLASSES.index(path.parent.name)


def all_images(tree: Path) -> list[Path]:
    return images_of(tree, "train") + images_of(tree, "val")


def table_of(tree: Path) -> list[dict[str, str]]:
    """The path, class and split of each picture."""
    return list(csv.DictReader(write_list(tree, tree / "rows.csv", "path,target,set").read_text().splitlines()))


def numbered(tree: Path, *, labeled: bool) -> Expected:
    """All pictures in one split, by number."""
    return {"train": {f"{i}": (label_of(p) if labeled else None, p) for i, p in enumerate(all_images(tree))}}


def array_of(path: Path) -> NDArray[np.float32]:
    """An array that only this picture has."""
    return np.frombuffer(hashlib.sha256(path.read_bytes()).digest(), np.uint8).astype(np.float32)


def other_words(tree: Path, folder: Path) -> tuple[Path, Expected]:
    shutil.copytree(tree / "train", folder / "Training")
    shutil.copytree(tree / "val", folder / "validation")
    return folder, of_tree(tree)


def flat(tree: Path, folder: Path) -> tuple[Path, Expected]:
    for path in images_of(tree, "train"):
        put(folder, path.name, content=path.read_bytes())
    return folder, {"train": {path.name: (None, path) for path in images_of(tree, "train")}}


def flat_splits(tree: Path, folder: Path) -> tuple[Path, Expected]:
    for split in ("train", "val"):
        for path in images_of(tree, split):
            put(folder / split.title(), path.name, content=path.read_bytes())
    return folder, of_tree(tree, lambda path: f"{path.parent.parent.name}/{path.name}", labeled=False)


def tiny_imagenet(tree: Path, folder: Path) -> tuple[Path, Expected]:
    def name(path: Path) -> str:
        is_train = path.parent.parent.name == "train"
        return f"train/{path.parent.name}/images/{path.name}" if is_train else f"val/images/{path.name}"

    for path in all_images(tree):
        put(folder, name(path), content=path.read_bytes())
    lines = (f"{path.name}\t{path.parent.name}\t0\t0\t9\t9\n" for path in images_of(tree, "val"))
    put(folder, "val/val_annotations.txt", content="".join(lines).encode())
    put(folder, "wnids.txt", content="\n".join(reversed(CLASSES)).encode())
    put(folder, "words.txt", content="".join(f"{c}\t{w}\n" for c, w in zip(CLASSES, WORDS, strict=True)).encode())
    return folder, of_tree(tree, name)


def json_lines(tree: Path, folder: Path) -> tuple[Path, Expected]:
    (tree / "list.jsonl").write_text("\n".join(map(json.dumps, table_of(tree))))
    return tree / "list.jsonl", of_tree(tree)


def parquet_table(tree: Path, folder: Path) -> tuple[Any, Expected]:
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(table_of(tree)), folder / "t")
    return Table(folder / "t", root=tree), of_tree(tree)


def lines(tree: Path, folder: Path) -> tuple[Path, Expected]:
    paths = images_of(tree, "train")
    (tree / "list.txt").write_text("".join(f"{p.relative_to(tree)} {label_of(p)}\n" for p in paths))
    return tree / "list.txt", {"train": of_tree(tree)["train"]}


def zipped(tree: Path, folder: Path) -> tuple[Path, Expected]:
    """A zip in a folder around it, as people make them, some of it stored and some deflated."""
    folder.mkdir()
    with zipfile.ZipFile(folder / "set.zip", "w") as file:
        for number, path in enumerate([*images_of(tree, "val"), *images_of(tree, "train")]):
            method = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)[number % 2]
            file.write(path, f"set/{path.relative_to(tree)}", method)
        file.writestr("set/README", "x")
        file.writestr("__MACOSX/set/._README", "x")
    return folder / "set.zip", of_tree(tree)


def tars_of_folders(tree: Path, folder: Path) -> tuple[Path, Expected]:
    for split, word in (("train", "train"), ("val", "Validation")):
        files = ((f"{path.parent.name}/{path.name}", path.read_bytes()) for path in images_of(tree, split))
        put(folder, f"{word}.tar", content=tar_of(files))
    return folder, of_tree(tree)


def arrays_tree(tree: Path, folder: Path) -> tuple[Path, Expected]:
    for path in tree.rglob("*.JPEG"):
        target = folder / path.relative_to(tree).with_suffix(".npy")
        target.parent.mkdir(parents=True, exist_ok=True)
        np.save(target, array_of(path))
    return folder, of_tree(tree, lambda path: str(path.relative_to(tree).with_suffix(".npy")))


def npy(tree: Path, folder: Path) -> tuple[Path, Expected]:
    expected = numbered(tree, labeled=False)
    folder.mkdir()
    np.save(folder / "a.npy", np.stack([array_of(path) for _, path in expected["train"].values()]))
    return folder / "a.npy", expected


def npz(save: Callable[..., None]) -> Callable[[Path, Path], tuple[Path, Expected]]:
    def build(tree: Path, folder: Path) -> tuple[Path, Expected]:
        expected = numbered(tree, labeled=True)
        values = expected["train"].values()
        folder.mkdir()
        save(folder / "a.npz", latent=np.stack([array_of(p) for _, p in values]), label=[label for label, _ in values])
        return folder / "a.npz", expected

    return build


class Items(list[Any]):
    """A dataset of Python, with the names of its classes."""

    classes = CLASSES


def dataset(tree: Path, folder: Path) -> tuple[Any, Expected]:
    found = of_tree(tree)
    items = {split: Items((path.read_bytes(), label) for label, path in some.values()) for split, some in found.items()}
    return items, {s: {f"{s}/{i}": one for i, one in enumerate(some.values())} for s, some in found.items()}


Build = Callable[[Path, Path], tuple[Any, Expected]]
Kept = Callable[[str], tuple[Any, Expected, Path]]
KINDS: dict[str, tuple[str, Build]] = {
    "tree": ("tree", lambda tree, folder: (tree, of_tree(tree))),
    "other words": ("tree", other_words),
    "flat": ("tree", flat),
    "flat splits": ("tree", flat_splits),
    "archives": ("ilsvrc", lambda tree, folder: (write_archives(tree, folder), of_tree(tree))),
    "kaggle": ("kaggle", lambda tree, folder: (write_kaggle(tree, folder), of_tree(tree))),
    "tiny": ("tiny-imagenet", tiny_imagenet),
    "csv": ("list", lambda tree, folder: (write_list(tree, tree / "list.csv"), of_tree(tree))),
    "tsv": ("list", lambda tree, _: (write_list(tree, tree / "l.tsv", "Image\tClass\tSubset", "\t"), of_tree(tree))),
    "json lines": ("list", json_lines),
    "parquet table": ("list", parquet_table),
    "lines": ("list", lines),
    "tars": ("webdataset", lambda tree, folder: (write_webdataset(tree, folder), of_tree(tree))),
    "tars with json": ("webdataset", lambda tree, out: (write_webdataset(tree, out, as_json=True), of_tree(tree))),
    "tars by a pattern": ("webdataset", lambda tree, out: (write_webdataset(tree, out) / "*-*.tar", of_tree(tree))),
    "zip": ("tree", zipped),
    "tars of folders": ("tree", tars_of_folders),
    "parquet": ("parquet", lambda tree, folder: (write_parquet(tree, folder), of_tree(tree))),
    "arrays": ("arrays", arrays_tree),
    "npy": ("npy", npy),
    "npz": ("npz", npz(np.savez)),
    "npz, compressed": ("npz", npz(np.savez_compressed)),
    "dataset": ("dataset", dataset),
}
NO_PIXELS = ("arrays", "npy", "npz", "npz, compressed")
UNLABELED = ("flat", "flat splits", "npy")
ORIGINS = ("tree", "archives", "parquet", "arrays", "npz, compressed", "dataset")
"""A kind for each class of origins."""
FOLDERS = ("tree", "archives", "kaggle", "tiny", "tars", "parquet", "arrays")
"""A kind for each way of listing a folder."""
NAMED = ("archives", "kaggle", "tiny")
"""The kinds that have readable names of classes."""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_imagenet(tmp_path_factory.mktemp("sources") / "imagenet", train=3, val=4, sound=True)


def build(kind: str, drawn: Path, folder: Path) -> tuple[Any, Expected]:
    """Returns SRC, and what is expected of it."""
    tree = Path(shutil.copytree(drawn, folder / "tree"))
    return KINDS[kind][1](tree, folder / "src")


def options_of(kind: str) -> dict[str, Any]:
    return OPTIONS if kind in NO_PIXELS else {**OPTIONS, "size": 8}


@pytest.fixture(scope="module")
def kept(drawn: Path, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """Builds a kind, and converts it, when it is first asked for. Returns (SRC, what is expected, the set)."""

    @cache
    def make(kind: str) -> tuple[Any, Expected, Path]:
        folder = tmp_path_factory.mktemp("kind")
        src, expected = build(kind, drawn, folder)
        report = convert(src, folder / "out", **options_of(kind))
        assert report.num_samples == {split: len(some) for split, some in expected.items()}
        assert report.unlabeled == (tuple(expected) if kind in UNLABELED else ())
        return src, expected, folder / "out"

    return make


def scanned(src: Any, labels: Any = None) -> Collection:
    if isinstance(src, dict):
        return list_datasets(src).collect()
    return scan(src, labels=labels)


def told(collection: Collection) -> dict[str, list[tuple[bytes, Any]]]:
    return {split: [(one.key, one.label) for one in sources] for split, sources in collection.splits.items()}


def check_content(collection: Collection, source: Source, path: Path) -> None:
    found = collection.origin.read(source)
    if isinstance(found, DatasetItem) and found.image is None:
        assert next(iter(found.arrays.values())).tolist() == array_of(path).tolist()
    else:
        assert (found.image if isinstance(found, DatasetItem) else found) == path.read_bytes()


AS_TREES = ("tree", "other words", "zip", "tars of folders", "archives", "kaggle", "arrays", "flat", "flat splits")


@pytest.mark.parametrize("kind", KINDS)
def test_keys_labels_splits_and_content_are_those_of_the_tree(
    kind: str, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever way folders list their files; and with the labels "none" but for the labels."""
    src, expected, _ = kept(kind)
    found = scanned(src)
    assert (found.kind, found.has_pixels) == (KINDS[kind][0], kind not in NO_PIXELS)
    # As they are listed, which is by name in archives, or as in a tree. Labels of a dataset come with its items.
    in_order = sorted if kind in (*AS_TREES, "parquet") else list
    assert list(told(found).items()) == [
        (split, [(os.fsencode(key), -1 if kind == "dataset" else some[key][0]) for key in in_order(some)])
        for split, some in expected.items()
    ]
    for split, sources in found.splits.items():
        for source in sources:
            check_content(found, source, expected[split][os.fsdecode(source.key)][1])
    numbers = ("0", "1", "2", "3")
    classes = () if kind in UNLABELED else numbers if kind in ("lines", "npz", "npz, compressed") else CLASSES
    assert (found.classes, found.class_names) == (classes, WORDS if kind in NAMED else ())
    if kind == "dataset":
        return
    unlabeled = scan(src, labels="none")
    assert (unlabeled.classes, unlabeled.class_names) == ((), ())
    labels = {split: [one.label for one in some] for split, some in unlabeled.splits.items()}
    assert labels == {split: [None] * len(some) for split, some in expected.items()}
    scandir, listdir = os.scandir, os.listdir

    @contextlib.contextmanager
    def backwards(path: Any = ".") -> Iterator[Iterator[os.DirEntry[str]]]:
        with scandir(path) as entries:
            yield iter(sorted(entries, key=lambda entry: hashlib.sha256(os.fsencode(entry.name)).digest()))

    monkeypatch.setattr(os, "scandir", backwards)
    monkeypatch.setattr(os, "listdir", lambda path=".": sorted(listdir(path), reverse=True))
    assert told(scanned(src)) == told(found)


@pytest.mark.parametrize("kind", FOLDERS)
def test_what_systems_leave_behind_is_counted_and_changes_nothing(kind: str, drawn: Path, tmp_path: Path) -> None:
    src, _ = build(kind, drawn, tmp_path)
    before = scan(src)
    inner = min((path for path in src.rglob("*") if path.is_dir()), key=lambda path: len(path.parts), default=src)
    put(src, ".DS_Store", "__MACOSX/._1.JPEG", "__MACOSX/1.JPEG", "._1.tar")
    for folder in {inner, *src.rglob("CLS-LOC")}:
        put(folder, "Thumbs.db", ".x.JPEG", ".ipynb_checkpoints/2.JPEG", "@eaDir/3.JPEG")
    found = scan(src)
    assert (told(found), found.classes, found.kind) == (told(before), before.classes, before.kind)
    more = {name: found.ignored[name] - before.ignored.get(name, 0) for name in ("hidden", "of the system")}
    # Inside of folders that only one of the kinds enters, nothing is counted.
    assert 2 <= more["hidden"] <= 4
    assert 1 <= more["of the system"] <= 3


@pytest.mark.parametrize("kind", [*ORIGINS, "csv"])
def test_an_origin_can_be_sent_and_fingerprints_change_with_the_files(kind: str, drawn: Path, tmp_path: Path) -> None:
    src, expected = build(kind, drawn, tmp_path)
    found = scanned(src)
    sent = pickle.loads(pickle.dumps(found))
    split, sources = next(iter(found.splits.items()))
    check_content(sent, sources[-1], expected[split][os.fsdecode(sources[-1].key)][1])
    before = found.origin.fingerprints(sources)
    assert sent.origin.fingerprints(sources) == before
    if kind != "dataset":
        for path in tmp_path.rglob("*"):
            os.utime(path, ns=(1, 1))
        assert not set(found.origin.fingerprints(sources)) & set(before)


@pytest.mark.parametrize("kind", [*ORIGINS, "tars", "npy", "npz"])
def test_a_piece_that_was_cut_short_is_refused_by_name(kind: str, drawn: Path, tmp_path: Path) -> None:
    src, _ = build(kind, drawn, tmp_path)
    if kind == "dataset":
        data = src["train"][1][0]
        src["train"][1] = (data[: len(data) // 2], src["train"][1][1])
        name = "train/1"
    else:
        files = (src if src.is_dir() else src.parent).rglob("*")
        largest = max((path for path in files if path.is_file()), key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
        name = largest.name
    if KINDS[kind][0] in ("ilsvrc", "webdataset", "parquet", "npy", "npz"):
        with pytest.raises(SourceError, match=name):
            convert(src, tmp_path / "out", **options_of(kind))
        assert not (tmp_path / "out").exists()
        return
    report = convert(src, tmp_path / "out", **options_of(kind), max_bad=1)
    assert sum(report.refused.values()) == 1
    (line,) = rejects(tmp_path / "out")
    assert (line["key"].endswith(name), line["reason"]) == (True, "damaged")


TREE_KEYS = ("other words", "zip", "tars of folders", "csv", "tsv", "json lines", "parquet table", "tars", "parquet")
"""The kinds that have the keys of a tree, and no readable names of classes."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_set_has_the_samples_and_those_of_a_tree_its_digest(kind: str, kept: Kept) -> None:
    _, expected, out = kept(kind)
    assert verify(out).ok
    for split, some in expected.items():
        shards = open_shards(out, split)
        found = [shards[i].label for i in range(len(shards))]
        assert found == [some[os.fsdecode(key)][0] for key in shards.index["key"].tolist()]
    if kind in TREE_KEYS:
        assert open_shards(out).digest == open_shards(kept("tree")[2]).digest


@pytest.mark.parametrize("kind", ORIGINS)
def test_however_it_is_converted_the_set_is_the_same(kind: str, kept: Kept, tmp_path: Path) -> None:
    """At once; in parts; stopped and resumed. And a finished set is recognized."""
    src, _, out = kept(kind)
    options = options_of(kind)
    whole, seen = hashes(out), everything(out)
    assert convert(src, out, **options).num_converted == 0
    assert everything(out) == seen
    for number in (2, 1):
        convert(src, tmp_path / "parts", **options, part=(number, 2))
    assert hashes(tmp_path / "parts") == whole
    with pytest.raises(KeyboardInterrupt):
        convert(src, tmp_path / "stopped", **options, on_progress=Interrupt(9))
    report = convert(src, tmp_path / "stopped", **options)
    assert 0 < report.num_converted < report.num_sources
    assert hashes(tmp_path / "stopped") == whole
    if kind != "dataset":
        planned = estimate(src, seconds=0.01, shard_size=options["shard_size"], size=options.get("size", 256))
        assert (planned.source, planned.num_sources) == (KINDS[kind][0], report.num_sources)
        assert planned.num_shards == report.num_shards


@pytest.mark.parametrize("kind", [*ORIGINS, "kaggle", "other words", "csv"])
def test_every_damaged_file_is_made_again_also_from_the_tree(kind: str, kept: Kept, tmp_path: Path) -> None:
    src, _, made = kept(kind)
    out = Path(shutil.copytree(made, tmp_path / "out"))
    if kind == "dataset":
        with pytest.raises(TypeError, match="expected the path of the images, found dict"):
            repair(out, src)
        return
    before = hashes(out)
    for path in out.glob("*.npy"):
        flip(path, 4100)
    assert repair(out, src, workers=1).repaired
    assert hashes(out) == before
    if kind in ("archives", "kaggle", "other words", "parquet"):  # the same list, in the same order
        (out / "train-00000.npy").unlink()
        assert repair(out, made.parent / "tree", workers=1).repaired == ("train-00000.npy",)
        assert hashes(out) == before


@pytest.mark.parametrize("kind", [*FOLDERS, "flat splits", "csv", "npz"])
def test_a_table_describes_the_samples(kind: str, kept: Kept, tmp_path: Path) -> None:
    """Its labels are taken, a sample that it lacks is left out, and a row alone is refused."""
    src, _, _ = kept(kind)
    listed = scanned(src, "none" if kind == "parquet" else None)
    keys = [os.fsdecode(one.key) for sources in listed.splits.values() for one in sources]
    rows = [f"{os.path.splitext(key)[0]},{number / 4},{number}" for number, key in enumerate(keys)][1:]
    (tmp_path / "table.csv").write_text("\n".join(["path,x,y", *rows, "train/missing,1,2"]))
    table = Table(tmp_path / "table.csv", label_columns=["x", "y"])
    found = collect(src, ConvertOptions(table=table))
    assert found.ignored["image in no table"] == 1
    labels = {os.fsdecode(one.key): one.label for sources in found.splits.values() for one in sources}
    assert labels == {**{key: (i / 4, i) for i, key in enumerate(keys) if i}, "train/missing": (1, 2)}
    (missing,) = (one for one in found.splits["train"] if one.key == b"train/missing")
    assert isinstance(missing.place, Fault)


@pytest.mark.parametrize("kind", KINDS)
def test_val_takes_a_share_of_the_only_split_and_is_refused_beside_other_splits(kind: str, kept: Kept) -> None:
    src, expected, _ = kept(kind)
    options = ConvertOptions(val=0.4)
    if len(expected) > 1:
        with pytest.raises(SourceError, match="'train', 'val'"):
            collect(src, options)
        return
    before, found = told(scanned(src))["train"], told(collect(src, options))
    assert len(found["train"]) + len(found["val"]) == len(before)
    assert {split: [one for one in before if one in some] for split, some in found.items()} == found


def test_an_image_stays_on_its_side_whatever_is_added(tmp_path: Path) -> None:
    src, out = tmp_path / "src", tmp_path / "out"
    for name in "abc":
        for i in range(20):
            write_jpeg(src / name / f"{i}.jpg", random_picture(np.random.default_rng(i), 9, 9))
    write_jpeg(src / "d/0.jpg", random_picture(np.random.default_rng(0), 9, 9))
    options = {**OPTIONS, "size": 8, "val": 0.2}
    report = convert(src, out, **options)
    assert "val has 11.5% of the samples: 0.0% of d to 15.0% of c" in report.notes
    assert report.notes[-1] == "val has no sample of 1 class: 'd'"
    parts = [convert(src, tmp_path / "parts", **options, part=(part, 2)) for part in (1, 2)]
    assert (parts[1].digest, parts[1].notes) == (report.digest, report.notes)
    (out / "val-00000.npy").unlink()
    assert repair(out, src, workers=1).repaired == ("val-00000.npy",)
    assert verify(out).ok
    with pytest.raises(ConvertError, match=r"val 0\.2, here 0\.3"):
        convert(src, out, **{**options, "val": 0.3})
    few, more = (told(collect(src, ConvertOptions(val=share)))["val"] for share in (0.2, 0.3))
    assert set(few) < set(more)
    shutil.copytree(src / "a", src / "A")
    again = told(collect(src, ConvertOptions(val=0.2, labels="none")))["val"]
    assert [key for key, _ in few] == [key for key, _ in again if not key.startswith(b"A/")]
    with pytest.raises(SourceError, match="none of the 81 images to 'val'"):
        collect(src, ConvertOptions(val=1e-9))
    with pytest.raises(ValueError, match=r"above 0\.0 and below 1\.0"):
        ConvertOptions(val=1.0)
