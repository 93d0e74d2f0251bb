"""One small ImageNet in every kind of storage, built as the real ones are; tars; and what a collection lists."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import random_picture, write_jpeg

from shardio.conversion.collect import collect
from shardio.conversion.options import ConvertOptions
from shardio.conversion.sources.collection import Collection
from shardio.conversion.sources.listing import Labels
from shardio.conversion.sources.tar import BLOCK_NBYTES
from shardio.conversion.sources.tree import list_tree

SYNSETS = {  # WordNet id -> (number, words); the numbers are in another order than the names, as in the real devkit
    "n01440764": (3, "tench, Tinca tinca"),
    "n01443537": (1, "goldfish, Carassius auratus"),
    "n02012849": (4, "crane"),
    "n03126707": (2, "crane"),
}
INNER_SYNSETS = {"n00001740": (5, "entity"), "n02512053": (6, "fish")}
CLASSES = tuple(SYNSETS)
WORDS = tuple(words for _, words in SYNSETS.values())


def draw_imagenet(root: Path, train: int = 5, val: int = 8, *, sound: bool = False) -> Path:
    """The usual tree of train and val with the real names. Unless all are to be sound, three images will be refused."""
    rng = np.random.default_rng(7)
    paths = [root / "train" / name / f"{name}_{9990 + 7 * i}.JPEG" for name in CLASSES for i in range(train)]
    paths += [root / "val" / CLASSES[i * 3 % 4] / f"ILSVRC2012_val_{i + 1:08d}.JPEG" for i in range(val)]
    for path in paths:
        height, width = rng.integers(20, 70, 2)
        write_jpeg(path, random_picture(rng, height, width))
    if not sound:
        paths[0].write_bytes(b"")
        paths[train].write_bytes(paths[train].read_bytes()[:-200])
        paths[-1].write_bytes(b"%PDF-1.7, and no JPEG")
    return root


def images_of(tree: Path, split: str) -> list[Path]:
    """Returns the files in the order of their names alone."""
    return sorted((tree / split).rglob("*.JPEG"), key=lambda path: path.name)


def write_archives(tree: Path, out: Path, *names: str) -> Path:
    """Writes ImageNet as it is downloaded: those of "train", "val" and "devkit" that are named, or all."""
    out.mkdir(parents=True, exist_ok=True)
    if not names or "train" in names:
        tars = [
            (f"{folder.name}.tar", tar_of((path.name, path.read_bytes()) for path in sorted(folder.iterdir())))
            for folder in sorted((tree / "train").iterdir())
        ]
        (out / "ILSVRC2012_img_train.tar").write_bytes(tar_of(tars))
    if not names or "val" in names:
        images = tar_of((path.name, path.read_bytes()) for path in images_of(tree, "val"))
        (out / "ILSVRC2012_img_val.tar").write_bytes(images)
    if not names or "devkit" in names:
        files = ((f"ILSVRC2012_devkit_t12/{name}", content) for name, content in devkit_files(tree).items())
        (out / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(gzip.compress(tar_of(files)))
    return out


def devkit_files(tree: Path) -> dict[str, bytes]:
    numbers = [SYNSETS[path.parent.name][0] for path in images_of(tree, "val")]
    return {
        "readme.txt": b"This is the documentation of the ILSVRC2012 Development Kit.\n",
        "data/meta.mat": meta_mat({**SYNSETS, **INNER_SYNSETS}),
        "data/ILSVRC2012_validation_ground_truth.txt": "".join(f"{number}\n" for number in numbers).encode(),
    }


def meta_mat(synsets: Mapping[str, tuple[int, str]]) -> bytes:
    """A struct array of one column, with the fields of the real one."""
    savemat = pytest.importorskip("scipy.io").savemat
    fields = ["ILSVRC2012_ID", "WNID", "words", "gloss"]
    fields += ["num_children", "children", "wordnet_height", "num_train_images"]
    rows = np.empty((len(synsets), 1), dtype=[(name, object) for name in fields])
    for row, (name, (number, words)) in zip(rows, sorted(synsets.items(), key=lambda item: item[1]), strict=True):
        children = [1, 3] if name in INNER_SYNSETS else []
        gloss = f"what {words} is"
        row[0] = (float(number), name, words, gloss, float(len(children)), children, float(bool(children)), 1300.0)
    buffer = io.BytesIO()
    savemat(buffer, {"synsets": rows})
    return buffer.getvalue()


def write_kaggle(tree: Path, out: Path) -> Path:
    images = out / "ILSVRC" / "Data" / "CLS-LOC"
    shutil.copytree(tree / "train", images / "train")
    for folder in ("val", "test"):
        (images / folder).mkdir()
    rows = []
    for path in images_of(tree, "val"):
        shutil.copy2(path, images / "val" / path.name)
        boxes = " ".join(f"{path.parent.name} {i} 1 49 27" for i in range(1, 3))
        rows.append((path.stem, boxes + " "))
    for number in range(1, 4):
        (images / "test" / f"ILSVRC2012_test_{number:08d}.JPEG").write_bytes(b"not looked at")
    (out / "ILSVRC" / "Annotations" / "CLS-LOC" / "val").mkdir(parents=True)
    with (out / "LOC_val_solution.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("ImageId", "PredictionString"), *reversed(rows)])
    words = "".join(f"{name} {words}\n" for name, (_, words) in SYNSETS.items())
    (out / "LOC_synset_mapping.txt").write_text(words)
    return out


def write_list(tree: Path, path: Path, header: str = "path,label,split", separator: str = ",") -> Path:
    lines = [header]
    for split in ("train", "val"):
        for image in images_of(tree, split):
            fields = [os.path.relpath(image, path.parent), image.parent.name, split]
            lines.append(separator.join(fields))
    path.write_text("\n".join(lines) + "\n")
    return path


def write_webdataset(tree: Path, out: Path, *, samples_per_tar: int = 6, as_json: bool = False) -> Path:
    """train-000000.tar, ..., val-000000.tar, ...: names without folders, the label beside each image."""
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        images = images_of(tree, split)
        for number in range(-(-len(images) // samples_per_tar)):
            files = []
            for path in images[number * samples_per_tar : (number + 1) * samples_per_tar]:
                label = path.parent.name
                text = json.dumps({"label": label, "width": 7}) if as_json else f"{label}\n"
                files += [(path.with_suffix(".json" if as_json else ".cls").name, text.encode())]
                files += [(path.name, path.read_bytes())]
            (out / f"{split}-{number:06d}.tar").write_bytes(tar_of(files))
    return out


def write_parquet(tree: Path, out: Path, files: Mapping[str, int] | None = None) -> Path:
    """The images of a tree as data/train-00000-of-00003.parquet and the like, as Hugging Face stores them."""
    for split, count in (files or {"train": 3, "val": 1}).items():
        paths = sorted((tree / split).rglob("*.JPEG"))
        classes = sorted(path.name for path in (tree / "train").iterdir())
        for number in range(count):
            some = paths[len(paths) * number // count : len(paths) * (number + 1) // count]
            name = f"{'validation' if split == 'val' else split}-{number:05d}-of-{count:05d}.parquet"
            labels = [classes.index(path.parent.name) for path in some]
            built = hub_table([path.read_bytes() for path in some], labels, [path.name for path in some], classes)
            put_parquet(out / "data" / name, built)
    return out


def hub_metadata(classes: Sequence[str]) -> dict[bytes, bytes]:
    features = {"image": {"_type": "Image"}, "label": {"names": list(classes), "_type": "ClassLabel"}}
    return {b"huggingface": json.dumps({"info": {"features": features}}).encode()}


def hub_table(
    images: Sequence[bytes | None],
    labels: Sequence[int | None],
    paths: Sequence[str | None] | None = None,
    classes: Sequence[str] = ("n01", "n02", "n03"),
) -> Any:
    import pyarrow as pa

    names = paths or [f"{i}.JPEG" for i in range(len(images))]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    column = pa.array([{"bytes": i, "path": p} for i, p in zip(images, names, strict=True)], kind)
    built = pa.table({"image": column, "label": pa.array(labels, pa.int64())})
    return built.replace_schema_metadata(hub_metadata(classes) if classes else None)


def put_parquet(path: Path, built: Any, **options: Any) -> Path:
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(built, path, **{"row_group_size": 4, **options})
    return path


Files = Iterable[tuple[str, bytes]]


def tar_of(files: Files, kind: int = tarfile.GNU_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), 1_300_000_000
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def header(name: bytes = b"a", nbytes: int = 0, kind: bytes = b"0", **changes: bytes) -> bytes:
    """One header with the right checksum, whatever else is in it."""
    fields = {
        "name": name.ljust(100, b"\0"),
        "mode": b"0000644\0" + b"0000000\0" * 2,
        "size": b"%011o\0" % nbytes,
        "time": b"00000000000\0",
        "checksum": b" " * 8,
        "kind": kind,
        "link": bytes(100),
        "magic": b"ustar  \0",
        "rest": bytes(247),
    } | changes
    block = b"".join(fields.values())
    assert len(block) == BLOCK_NBYTES
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


END = bytes(2 * BLOCK_NBYTES)


def npy_bytes(*arrays: Any) -> bytes:
    """One NPY file after another."""
    file = io.BytesIO()
    for array in arrays:
        np.save(file, array, allow_pickle=True)
    return file.getvalue()


def scan(src: str | os.PathLike[str], source: Any = "auto", **options: Any) -> Collection:
    """Returns the images of SRC as `convert` finds them."""
    return collect(src, ConvertOptions(source=source, **options))


def scan_tree(root: Path, labels: Labels | None = None) -> Collection:
    """Returns the images of a tree in spite of doubts."""
    return list_tree(root, labels).collect(labels or "folders")


def rows(found: Collection, split: str = "train") -> list[tuple[bytes, Any]]:
    return [(source.key, source.label) for source in found.splits[split]]


def keys(collection: Collection) -> dict[str, list[bytes]]:
    return {split: [source.key for source in sources] for split, sources in collection.splits.items()}
