"""What is refused before anything is written: for each mistake, the file that is named, and a word of the reason."""

from __future__ import annotations

import gzip
import io
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from folders import put
from pictures import random_jpeg
from storages import END, header, hub_table, npy_bytes, tar_of

from shardio.conversion.convert import convert
from shardio.conversion.sources import webdataset
from shardio.errors import SourceError

PICTURE = random_jpeg(0, 12, 15)
Files = dict[str, bytes]
Refusal = tuple[str, Files, str]
"""SRC in a folder, the files in the folder, and what the message says: a regular expression."""


def images(*names: str, **others: bytes) -> Files:
    return {**dict.fromkeys(names, PICTURE), **others}


def objects(*labels: str) -> str:
    return "\n".join(f'{{"path": "a/{number}.jpg", "label": {label}}}' for number, label in enumerate(labels, 1))


def hub(**columns: Any) -> bytes:
    return parquet(pa.table(columns))


def parquet(table: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def one(**options: Any) -> bytes:
    return parquet(hub_table([b"x"], [0], **options))


def series(name: str, count: int) -> list[str]:
    return [f"{name}-{number:05}-of-{count:05}.parquet" for number in range(count)]


def metadata(text: bytes) -> bytes:
    return parquet(hub_table([b"x"], [0]).replace_schema_metadata({b"huggingface": text}))


def claimed(shape: str) -> bytes:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}" if shape.startswith("(") else shape
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def archive(method: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as written:
        for name, data in members.items():
            written.writestr(name.replace("__", "/").replace("_npy", ".npy"), data)
    return file.getvalue()


ROWS = np.arange(40 * 24, dtype=np.float16).reshape(40, 2, 3, 4)
SOUND = npy_bytes(ROWS)
_ENCRYPTED = bytearray(archive(a_npy=SOUND))
_ENCRYPTED[6] |= 1  # the flag, in the local header and in the directory
_ENCRYPTED[_ENCRYPTED.index(b"PK\x01\x02") + 8] |= 1
_FLIPPED = bytearray(archive(a_npy=SOUND))
_FLIPPED[1000] ^= 4
_BOMB = bytearray(archive(zipfile.ZIP_DEFLATED, a_npy=SOUND))
_BOMB[(_place := _BOMB.index(b"PK\x01\x02") + 24) : _place + 4] = b"\xf0\xff\xff\xff"  # its size, in the directory

TRAIN = "ILSVRC2012_img_train.tar"
PAIR = [("1.jpg", PICTURE), ("1.cls", b"0")]


def class_tar(*files: tuple[str, bytes], end: int | None = None) -> Files:
    return {TRAIN: tar_of([("n01.tar", tar_of(files)[:end])])}


TREES: dict[str, Refusal] = {
    "an unknown class": (".", images("train/a/1", "train/a/1.png", "val/a/2.png", "val/new/3"), "/val/new: .*'new'"),
    "no image": (".", images("a/.b/1.jpg", ".a/1.jpg", "c/d/", x=b""), "found none"),
    "nothing": (".", {"train/a/": b""}, "found none"),
    "no such folder": ("gone", {}, "gone: expected a folder of images, found nothing"),
    "classes that are splits": ("list", images("1.jpg", "2.jpg", list=b"1.jpg train\n2.jpg dev\n"), "'dev', 'train'"),
    "a text": ("x", {"x": b"\xff\xd8\xff\xe0 \0"}, "x: expected a folder, a tar, .* another file"),
    "CIFAR": (".", dict.fromkeys(("data_batch_1", "batches.meta"), b"\x80"), r"datasets\.CIFAR10\(ROOT\)"),
    "archives and a tree": (".", {TRAIN: b"", "train/n01/1.JPEG": b""}, "--source ilsvrc"),
}

TABLES: dict[str, Refusal] = {
    name: (file, images("a/1.jpg", "a/2.jpg", **{file: text if isinstance(text, bytes) else text.encode()}), word)
    for name, (file, text, word) in {
        "no row": ("list.txt", "", "list.txt: expected images"),
        "a header alone": ("l.csv", "path,label\n", "l.csv: expected images"),
        "no column of paths": ("l.csv", "a/1.jpg,0\n", "--path-column"),
        "a mark among names": ("l.csv", "path,label\na/1.jpg,-1\na/2.jpg,x\n", "line 2: expected .*found '-1'"),
        "two columns of paths": ("l.csv", "file,image,label\na,b,c\n", "found 'file', 'image'..*--path-column"),
        "two columns of labels": ("l.csv", "path,class,category\na,b,c\n", "'class', 'category'..*--label-column"),
        "a column twice": ("l.csv", "path,path,label\na,b,c\n", "2 columns of this name: rename one"),
        "which is the label": ("l.csv", "path,x,y\na/1.jpg,1,2\n", "'x', 'y'.*--label-column"),
        "two words for a split": ("l.csv", "path,label,split\na/1.jpg,x,Val\na/2.jpg,x,dev\n", "'dev' and 'val'"),
        "a quoted word": ("l", 'a/1.jpg x\na/2.jpg "x"\n', "line 2: .*quotes"),
        "a quoted cell": ("l.csv", "path,label\na/1.jpg,x\na/2.jpg,'x'\n", "line 3: .*quotes"),
        "a stray quote": ("l.csv", 'path,label\na/1.jpg,x\na/2.jpg,x"\n', "line 3: .*quotes"),
        "a label of two lines": ("l.csv", 'path,label\na/1.jpg,x\na/2.jpg,"x\n3,y"\n', "line 4: .*one line"),
        "a decimal comma": ("l.csv", "path;label\na/1.jpg;1\na/2.jpg;0,5\n", "line 3: .*decimal point"),
        "decimal commas": ("l.csv", "path;label\na/1.jpg;1,5\na/2.jpg;0,5\n", "2 lines are wrong.*line 3: .*decimal"),
        "a label that is not UTF-8": ("l.csv", b"path,label\na/1.jpg,caf\xe9\n", "line 2: .*save the table as UTF-8"),
        "a header of other words": ("l", "image_name breed\na/1.jpg x\na/2.jpg y\n", "line 1: .*a header out"),
        "a label with a blank": ("l", "a/1.jpg great dane\na/2.jpg x\n", "line 1: .*tab"),
        "labels with blanks": ("l", "a/1.jpg great dane\na/2.jpg husky dog\n", "2 lines .*line 2: .*tab"),
        "no names of columns": ("l.csv", "a/1.jpg,39,0\na/2.jpg,40,1\n", r"into the first line; [^\n]*$"),
        "paths of masks": ("l.csv", "path,label\na/1.jpg,m/1.png\na/2.jpg,m/2.png\n", "line 2: .*path of an image"),
        "texts of lists": ("l.csv", "path,label\na/1.jpg,['x']\na/2.jpg,\"['x', 'y']\"\n", "line 2: .*JSON"),
        "beyond float32 in whole numbers": ("l.csv", "path,label\na/1.jpg,0.5\na/2.jpg,16777217\n", "float32 holds"),
        "lists in a list": ("l", objects('["x", ["y"]]', '["z"]'), "line 1: .*a list of names"),
        "an open quote": ("l.csv", 'path,label\n"a/1.jpg,0\n', "valid CSV"),
        "a long line": ("l.csv", "path,label\na/1.jpg," + "x" * 200_000, "fewer than 65,536"),
        "a long first line": ("l.txt", "x" * 100_000 + " 0\n", "line 1: .*65,536"),
        "NUL": ("l.txt", '{"path": "a\\u0000b.jpg"}', "without NUL"),
        "a long path": ("l.txt", "x" * 5000 + " 0\n", "1 to 4,096 bytes"),
        "paths of elsewhere": ("l.txt", "images/a/1.jpg 0\n", "'images/a/1.jpg' is not in .*--root"),
        "URLs": ("l.txt", "https://host/a/1.jpg 0\n", "copy the images to files here"),
        "absolute paths": ("l.txt", "/usr/nowhere/2.jpg 0\nb/1.jpg 0\n", "of '/usr/nowhere/2.jpg' only '/usr' exists"),
        "fields missing": ("l.csv", "path,label,split\na/1.jpg,x,train\na/2.jpg,x\n", "line 3: expected 3 fields"),
        "a path missing": ("l.csv", "path,label\na/1.jpg,x\n,x\n", "line 3: expected a path"),
        "another class": ("l.csv", "path,label,split\na/1.jpg,x,train\na/2.jpg,z,val\n", "line 3: .*'train'"),
        "an odd split": ("l.csv", "path,label,split\na/1.jpg,x,train\na/2.jpg,x,a/b\n", "line 3: expected a split"),
        "a number missing": ("l.csv", "path,label\na/1.jpg,0.5\na/2.jpg,\n", "expected a label.*a/2.jpg"),
        "a label missing": ("l.csv", "path,label,split\na/1.jpg,x,train\na/2.jpg,,train\n", "a label.*a/2.jpg"),
        "beyond float32": ("l.csv", "path,label\na/1.jpg,1e99\na/2.jpg,0.5\n", "line 2: expected numbers"),
        "lists of lengths": ("l", objects("[1]", "[1, 2]"), "line 2: .*1 n"),
        "an empty list": ("l", objects("[]", "[1]"), "line 1: .* numbers"),
        "an object": ("l", objects('{"x": 1}'), "line 1: expected a name"),
        "an unknown name": ("l", '{"path": "a/1.jpg"}\n{"path": "a/2.jpg", "x": 3}', "line 2: .*'x'"),
        "half a character": ("l", '{"path": "a/1.jpg"}\n{"path": "\\ud800"}\n', "line 2: expected a JSON object"),
        "a repeated name": ("l", '{"path": "a/1.jpg"}\n{"path": "a/1.jpg", "path": "x"}\n', "line 2: .*'path' twice"),
        "a repeated path": ("l", '{"a/1.jpg": "x", "a/2.jpg": "y", "a/1.jpg": "y"}', "l: .*'a/1.jpg' twice"),
        "a broken document": ("l.json", '[{"path": "a/1.jpg"}, ', "l.json: expected JSON"),
        "a document without objects": ("l.json", '["a/1.jpg", "a/2.jpg"]', "l.json: .*JSON object"),
        "an item of other names": ("l", '[{"path": "a/1.jpg"}, {"path": "a/2.jpg", "x": 1}]', "item 1: .*'x'"),
        "a quote after a blank": ("l.csv", 'path,label\na/1.jpg, "x"\n', "line 2: .*quotes"),
        "rows within quotes": ("l.csv", 'path,label,x\na/1.jpg,x,"y\na/2.jpg,x,y"\n', "line 3: .*quotes"),
        "half of UTF-16": ("l.csv", b"\xff\xfep\0a\0t\0h\0\n\0a", "l.csv: cannot read"),
        "no JSON": ("l", '{"path": "a/1.jpg"}\n{"path"\n[1]\n', "line 2: expected a JSON object"),
    }.items()
}

CONTAINERS: dict[str, Refusal] = {
    name: (src, {src if src != "." else f"a/{name}": data}, f"{what}.*{name}.*docs/guide/collections.md")
    for name, data, what, src in (
        ("data-00000-of-00001.arrow", b"", "Arrow", "."),
        ("state", b"ARROW1", "Arrow", "."),
        ("train_32x32.mat", b"", "MATLAB", "."),
        ("x", b"\x89HDF\r\n\x1a\n", "HDF5", "."),
        ("x.h5", b"\0", "HDF5", "x.h5"),
        ("train.tfrecord-00000-of-00001", b"\0", "TFRecord", "train.tfrecord-00000-of-00001"),
        ("ld_train0-1338.tfrec", b"", "TFRecord", "."),
        ("data.mdb", b"", "LMDB", "."),
        ("train.rec", b"", "RecordIO", "."),
        ("y", b"\x0a\x23\xd7\xce", "RecordIO", "y"),
        ("train-images-idx3-ubyte", b"", "idx", "."),
        ("shard.00000.mds.zstd", b"", "MosaicML", "."),
        ("train.beton", b"", "FFCV", "."),
        ("IM0001", bytes(128) + b"DICM", "DICOM", "."),
        ("1.dcm", bytes(140), "DICOM", "1.dcm"),
        ("train.pkl", b"", "pickle", "."),
        ("pathmnist.npz", b"", "NPZ", "."),
    )
}

TARS: dict[str, Refusal] = {
    "beside pictures": (".", {"a.tar": b"", "1.jpg": b""}, "'a.tar' and '1.jpg': .*--source tree"),
    "beside other parquet": (".", {"t/a.tar": b"", "b.parquet": b""}, "'t' and 'b.parquet'.*--source parquet"),
    "no sample": ("x.tar", {"x.tar": tar_of([("1.txt", b"")])}, "x.tar: expected images, found none.*--source ilsvrc"),
    "images alone": ("x.tar", {"x.tar": tar_of([("n01/1.JPEG", b"")])}, "--labels none"),
    "a name twice": ("0.tar", {"0.tar": tar_of([*PAIR, ("0/1.jpg", b""), ("0/1.cls", b"0")])}, "'0/1.jpg'.* twice"),
    "some tell a split": (".", {"train-0.tar": tar_of(PAIR), "a.tar": tar_of(PAIR)}, "none for 'a.tar'"),
    "two splits in a name": (".", {"train-val-0.tar": tar_of(PAIR)}, "'train-val-0.tar', found train and val"),
    "two words": (".", {"val-0.tar": tar_of(PAIR), "validation-0.tar": tar_of(PAIR)}, "'val' and 'validation'"),
    "a truncated tar": (".", {"a.tar": tar_of(PAIR)[:900]}, "/a.tar: .*truncated"),
    "an encrypted zip": ("x.zip", {"x.zip": bytes(_ENCRYPTED)}, "x.zip: .*'a.npy' encrypted"),
    "a zip of another method": ("x.zip", {"x.zip": archive(zipfile.ZIP_BZIP2, a__1_jpg=b"x")}, "x.zip: .*unpack"),
    "a truncated zip": ("x.zip", {"x.zip": archive(a=b"x" * 100)[:-30]}, "x.zip: damaged, or no zip archive"),
    "a zip that leads elsewhere": ("x.zip", {"x.zip": archive(**{"..__1.jpg": b"x"})}, "x.zip: .*without '..'"),
    "a zip of texts": ("x.zip", {"x.zip": archive(a=b"x")}, "x.zip: expected images, found none"),
    "a compressed tar": ("a.tar.gz", {"a.tar.gz": gzip.compress(tar_of(PAIR))}, "compressed with gzip"),
    "a pattern of none": ("b*.tar", {}, "found none for"),
    "a pattern of too many": ("a-{0..9999999999}-{0..9999999999}.tar", {}, "at most 1,000 "),
    "names that are not there": ("{a-{0..399},b-{0..399}}.tar", {}, "800 names without a file"),
    "an open brace": ("a-{008..011.tar", {}, "FIRST..LAST"),
    "a brace of nothing": ("{tars}/x", {}, "FIRST..LAST"),
}

PARQUETS: dict[str, Refusal] = {
    "two configurations": (
        ".",
        dict.fromkeys(series("a/train", 1) + series("b/train", 1), one()),
        "one series .*'train",
    ),
    "two numbered series": (".", dict.fromkeys(series("train", 1) + series("train", 2), one()), "00001' and '.*00002"),
    "folders of two configurations": (".", {"a/train/0.parquet": one(), "b/train/0.parquet": one()}, "'b/train/"),
    "two words": (".", {"val.parquet": one(), "validation.parquet": one()}, "'val.' and 'validation."),
    "a file without a split": (".", {"train.parquet": one(), "more.parquet": one()}, "/more.parquet: expected a split"),
    "one of three": (".", dict.fromkeys(series("train", 3)[::2], one()), "number 00001"),
    "no label": ("a.parquet", {"a.parquet": parquet(hub_table([b"x"], [-1]))}, "rows with a label"),
    "no UTF-8": (".", {"\udcff.parquet": b"PAR1"}, r"udcff\.parquet: expected a path in UTF-8"),
    "other classes": (".", {"a.parquet": one(), "b.parquet": one(classes=["n02", "n01"])}, "b.parquet: .*classes"),
    "another column": (".", {"a.parquet": one(), "b.parquet": hub(image=[b"x"], label=[0])}, "b.parquet: .*bytes"),
    "labels in some": (".", {"a.parquet": hub(image=[b"x"]), "b.parquet": hub(image=[b"x"], label=[1])}, "b.parq"),
    **{
        name: ("a.parquet", {"a.parquet": data}, f"a.parquet: .*{word}")
        for name, data, word in (
            ("no image", hub(label=[1]), "column of images"),
            ("paths of images", hub(file=["x"], label=[1]), "--root"),
            ("a float", hub(image=[b"x"], label=[3.0]), "type double. Rewrite it as integers"),
            ("a soft label", hub(image=[b"x"], label=[[0.1]]), "list<element: double>"),
            ("two labels", hub(img=[b"x"], fine=[1], coarse=[1]), "'fine', 'coarse'.*--label-column fine"),
            ("two images", hub(left=[b"x"], right=[b"x"], label=[1]), "left, right. Rename"),
            ("an image of text", hub(image=["x"], label=[1]), "column of images"),
            ("an image of numbers", hub(image=[[1, 2]], label=[1]), "column of images"),
            ("a struct without bytes", hub(image=[{"path": "a"}], label=[1]), "column of images"),
            ("a label beyond the classes", parquet(hub_table([b"x"] * 4, [0, 2, 3, 99])), "2 rows.*row 2: .*found 3"),
            ("a label below all", parquet(hub_table([b"x"] * 2, [0, -2])), "row 1: .*found -2"),
            ("no class number", parquet(hub_table([b"x"] * 2, [0, 1 << 40], classes=())), "row 1: .*1099511627776"),
            ("two ways to write a number", hub(image=[b"x"] * 2, label=["01", "1"]), "expected 1, as .* found '01'"),
            ("beyond int64", hub(image=[b"x"], label=pa.array([1 << 63], pa.uint64())), "9223372036854775808"),
            ("a class twice", one(classes=["cat", "dog", "cat"]), "'cat' twice"),
            ("classes of numbers", one(classes=[1, 2]), "class names"),
            ("a class of half a character", one(classes=["\ud800"]), "valid text"),
            ("metadata of another kind", metadata(b"[1]"), "info.features"),
            ("metadata that is no JSON", metadata(b'{"info": {'), "info.features"),
            ("deep metadata", metadata(b"[" * 100_000), "info.features"),
            ("a long name", one(paths=["y" * 70_000]), "65,532 bytes"),
        )
    },
}

ARCHIVES: dict[str, Refusal] = {
    name: (".", files if isinstance(files, dict) else {TRAIN: files}, f"{TRAIN}.*{word}|{word}")
    for name, files, word in (
        ("an image twice", class_tar(("1.JPEG", b"x"), ("1.JPEG", b"y")), "train/n01/1.JPEG.*once"),
        ("a class twice", tar_of([("n01.tar", tar_of([])), ("b/n01.tar", tar_of([]))]), "a second archive of 'n01'"),
        ("a symbolic link", tar_of([("n01.tar", header(b"1.JPEG", kind=b"2") + END)]), "the symbolic link '1.JPEG'"),
        ("a compressed class", tar_of([("n01.tar", gzip.compress(tar_of([]), mtime=0))]), "'n01.tar' in it: .*gzip"),
        ("a truncated class", class_tar(("1.JPEG", bytes(5000)), end=3000), "'n01.tar' in it: .*truncated"),
        ("a truncated archive", class_tar(("1.JPEG", bytes(5000)))[TRAIN][:5000], "'n01.tar' of .* the end"),
        ("no image", tar_of([("n01.tar", tar_of([]))]), "found none"),
        ("no class", tar_of([]), "found none"),
    )
}

ARRAYS: dict[str, Refusal] = {
    name: (file, {file: data}, f"{re.escape(file)}.*({word})")
    for name, file, data, word in (
        ("truncated", "a.npy", SOUND[:-1], "2,048 bytes.* found 2,047"),
        ("longer", "a.npy", SOUND + b"x", "2,048 bytes"),
        ("two arrays", "a.npy", SOUND + SOUND, "2,048 bytes"),
        ("nothing but the magic", "a.npy", b"\x93NUMPY", "an array"),
        ("objects", "a.npy", npy_bytes(np.array([{}, None])), "Python objects"),
        ("text", "a.npy", npy_bytes(np.array(["a", "b"])), "type must be one of"),
        ("fields", "a.npy", npy_bytes(np.zeros(3, [("a", "<i4")])), "type must be one of"),
        ("complex numbers", "a.npy", npy_bytes(np.zeros(3, complex)), "type must be one of"),
        ("a single value", "a.npy", npy_bytes(np.array(3)), "first axis"),
        ("no samples", "a.npy", npy_bytes(np.zeros((0, 3))), r"shape \(0, 3\)"),
        ("empty samples", "a.npy", npy_bytes(np.zeros((3, 0))), "integers from 1 to"),
        ("by columns", "a.npy", npy_bytes(np.asfortranarray(np.zeros((3, 4)))), "Fortran"),
        ("negative", "a.npy", claimed("(-1, 4)"), r"\(-1, 4\)"),
        ("petabytes", "a.npy", claimed("(1000000000000, 65536)"), "as its header says"),
        ("huge samples", "a.npy", claimed("(1, 65536, 65536, 65536)"), "as its header says"),
        ("code", "a.npy", claimed("__import__('os').system('true')"), "an array"),
        ("nested", "a.npy", claimed("[" * 9000), "an array"),
        ("another version", "a.npy", b"\x93NUMPY\x09\x00" + SOUND[8:], "version 9"),
        ("no zip", "a.npz", b"PK\x03\x04 and nothing", "an array"),
        ("an empty archive", "a.npz", archive(), "no array"),
        ("a truncated archive", "a.npz", archive(a_npy=SOUND)[:-30], "an array"),
        ("a truncated member", "a.npz", archive(a_npy=SOUND[:-1]), "'a.npy': .*2,048 bytes"),
        ("a member that differs from its checksum", "a.npz", bytes(_FLIPPED), "CRC"),
        ("encrypted", "a.npz", bytes(_ENCRYPTED), "encrypted|password"),
        ("a member of objects", "a.npz", archive(a_npy=npy_bytes(np.array([{}, None]))), "'a.npy': .*Python objects"),
        ("a member that is no array", "a.npz", archive(readme=b"hello"), "'readme': .*NAME.npy"),
        ("a path", "a.npz", archive(**{".._npy": SOUND, "..__..__etc__x_npy": SOUND}), "name must be"),
        ("a reserved name", "a.npz", archive(images_npy=SOUND), "'images'"),
        ("other counts", "a.npz", archive(a_npy=SOUND, b_npy=npy_bytes(np.zeros(3))), "40 rows of a, 3 rows of b"),
        ("labels alone", "a.npz", archive(label_npy=npy_bytes(np.zeros(3, int))), "labels alone"),
        ("labels twice", "a.npz", archive(a_npy=SOUND, label_npy=SOUND, labels_npy=SOUND), "'label' and 'labels'"),
        ("labels of matrices", "a.npz", archive(a_npy=SOUND, label_npy=npy_bytes(np.zeros((40, 2, 2)))), r"\(2, 2\)"),
        ("labels beyond int64", "a.npz", archive(a_npy=SOUND, label_npy=npy_bytes(np.full(40, 1 << 63, "u8"))), "int"),
        ("too many", "a.npz", archive(**{f"a{i}_npy": npy_bytes(np.zeros(3)) for i in range(60)}), "at most 50 arrays"),
        ("a bomb", "a.npz", bytes(_BOMB), "bytes"),
        ("pictures", "a.npz", archive(train_images_npy=npy_bytes(np.zeros((2, 3, 3), "u1"))), "'train_images'.*Python"),
    )
} | {
    "a file for each split": (".", {"train.npy": SOUND, "val.npy": SOUND}, "a file for each split"),
    "no array that can be stored": (".", {"1.npy": b"x", "2.npy": b""}, "can be stored.*1.npy"),
}

KINDS = ("tree", "container", "table", "tar", "parquet", "ilsvrc", "arrays")
GIVEN = (TREES, CONTAINERS, TABLES, TARS, PARQUETS, ARCHIVES, ARRAYS)
REFUSALS = {f"{kind}: {name}": table[name] for kind, table in zip(KINDS, GIVEN, strict=True) for name in table}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_mistake_is_refused_by_name_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webdataset, "_MOST_TARS", 1000)
    src, files, match = REFUSALS[name]
    for path, content in files.items():
        put(tmp_path / "in", path.encode("utf-8", "surrogateescape"), content=content)
    kind: Any = "parquet" if name.startswith("parquet") else "auto"
    with pytest.raises(SourceError, match=f"(?s){match}") as caught:
        convert(tmp_path / "in" / src, tmp_path / "out", source=kind)
    assert str(caught.value).startswith(str(tmp_path / "in"))
    assert max(map(len, str(caught.value).splitlines())) <= 1002
    assert not (tmp_path / "out").exists()
