"""Tables and lists of images: what their rows mean, and every fault with its line."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import shlex
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from folders import put
from pictures import random_jpeg
from storages import npy_bytes, rows, scan

from shardio.conversion.collect import collect
from shardio.conversion.convert import convert
from shardio.conversion.options import ConvertOptions
from shardio.conversion.repair import repair
from shardio.conversion.sources.collection import Collection
from shardio.conversion.sources.doubt import DoubtError
from shardio.conversion.sources.listed import list_table
from shardio.conversion.sources.table import Table
from shardio.errors import DecodeError, SourceError


def listed(folder: Path, text: str | bytes, name: str = "list.txt", **options: Any) -> Collection:
    path = folder / name
    path.write_bytes(text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text)
    return list_table(Table(path, **options)).collect("folders")


def refused(folder: Path, text: str | bytes, name: str = "list.txt", **options: Any) -> str:
    with pytest.raises(SourceError) as caught:
        listed(folder, text, name, **options)
    message = str(caught.value)
    assert message.startswith(f"{folder / name}: "), message
    return message


COCO: dict[str, Any] = {
    "images": [{"id": 7, "file_name": "a/1.jpg"}, {"id": 3, "file_name": "b/3.jpg"}],
    "annotations": [
        {"image_id": 3, "category_id": 1},
        {"image_id": 7, "category_id": 2, "bbox": [0, 0, 1, 1]},
        {"image_id": 3, "category_id": 1},
    ],
    "categories": [{"id": 1, "name": "y"}, {"id": 2, "name": "x"}, {"id": 5, "name": "z"}],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    put(tmp_path, "a/1.jpg", "a/2.jpg", "b/3.jpg", "my dog.jpg", "c/4.jpg")
    return tmp_path


# --- what lines mean --------------------------------------------------------------------------------------------------


def test_a_line_is_a_path_and_a_label_which_is_the_last_word(folder: Path) -> None:
    found = listed(folder, "b/3.jpg 1\na/1.jpg   0\r\n\nmy dog.jpg\t2  \na/2.jpg 0")
    assert rows(found) == [(b"b/3.jpg", 1), (b"a/1.jpg", 0), (b"my dog.jpg", 2), (b"a/2.jpg", 0)]
    assert found.classes == ("0", "1", "2")
    assert found.kind == "list"
    assert list(found.splits) == ["train"]


def test_after_a_tab_a_label_may_have_spaces(folder: Path) -> None:
    found = listed(folder, "a/1.jpg\tgreat white shark\nmy dog.jpg\tdog\n")
    assert rows(found) == [(b"a/1.jpg", 1), (b"my dog.jpg", 0)]
    assert found.classes == ("dog", "great white shark")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("path,label\na/1.jpg,x\nb/3.jpg,y\n", "list.csv"),
        ("label,path\nx,a/1.jpg\ny,b/3.jpg\n", "list.csv"),
        ("id,FileName,Class,width\n7,a/1.jpg,x,20\n8,b/3.jpg,y,30\n", "list.csv"),
        ("image\ttarget\na/1.jpg\tx\nb/3.jpg\ty\n", "list.tsv"),
        ('"path","label"\n"a/1.jpg","x"\n"b/3.jpg","y"\n', "list.csv"),
        ("\ufeffpath,label\r\na/1.jpg,x\r\nb/3.jpg,y\r\n", "list.csv"),
        ("path,label\na/1.jpg,x\n\nb/3.jpg, y \n", "list.txt"),
        ("file label\na/1.jpg x\nb/3.jpg y\n", "list.txt"),
        ("path,label,class\na/1.jpg,x,animal\nb/3.jpg,y,animal\n", "list.csv"),
        ("path,label\na/1.jpg,x\nb/3.jpg,y", "no suffix"),
        ("path;label\na/1.jpg;x\nb/3.jpg;y\n", "list.csv"),
        ("path|label\na/1.jpg|x\nb/3.jpg|y\n", "list.txt"),
        ('path,"label;\t|",class\na/1.jpg,0,x\nb/3.jpg,0,y\n', "list.csv"),
        ("path\tlabel\na/1.jpg\tx\nb/3.jpg\ty\n".encode("utf-16"), "list.txt"),
        (codecs.BOM_UTF16_BE + "path,label\na/1.jpg,x\nb/3.jpg,y\n".encode("utf-16-be"), "list.csv"),
        ('[{"path": "a/1.jpg", "label": "x"}, {"path": "b/3.jpg", "label": "y"}]', "list.json"),
        ('[\n {"label": "x", "path": "a/1.jpg"},\n {"path": "b/3.jpg", "label": "y"}\n]', "list.txt"),
        ('{"a/1.jpg": "x", "b/3.jpg": "y"}', "list.json"),
        ('{\n "a/1.jpg": "x",\n "b/3.jpg": "y"\n}', "list.json"),
        ('\n{"path": "a/1.jpg", "label": "x"}\n\n{"path": "b/3.jpg", "label": "y"}', "list.jsonl"),
        (json.dumps(COCO), "list.json"),
    ],
)
def test_columns_are_found_by_name(text: str | bytes, name: str, folder: Path) -> None:
    found = listed(folder, text, name)
    assert rows(found) == [(b"a/1.jpg", 0), (b"b/3.jpg", 1)]
    assert found.classes == ("x", "y")


def test_quoted_fields_may_hold_commas_quotes_and_line_breaks(folder: Path) -> None:
    put(folder, 'a,"b"\nc.jpg')
    found = listed(folder, 'path,label\n"a,""b""\nc.jpg","x, y"\n', "list.csv")
    assert rows(found) == [(b'a,"b"\nc.jpg', 0)]
    assert found.classes == ("x, y",)


def test_a_column_tells_the_split(folder: Path) -> None:
    lines = ["a/1.jpg,x,train", "a/2.jpg,y,Validation", "b/3.jpg,x,test", "my dog.jpg,y,train", "c/4.jpg,x,fold_1"]
    found = listed(folder, "\n".join(["path,label,split", *lines]), "list.csv")
    assert list(found.splits) == ["train", "val", "test", "fold_1"]
    assert [rows(found, split) for split in found.splits] == [
        [(b"a/1.jpg", 0), (b"my dog.jpg", 1)],
        [(b"a/2.jpg", 1)],
        [(b"b/3.jpg", 0)],
        [(b"c/4.jpg", 0)],
    ]


def test_splits_that_are_numbers_have_no_meaning_unless_their_column_is_named(folder: Path) -> None:
    csv, lines = folder / "list.csv", folder / "list.jsonl"
    csv.write_text("path,label,split\na/1.jpg,x,0\na/2.jpg,x,1\n")
    lines.write_text('{"path": "a/1.jpg", "label": "x", "split": 0}\n{"path": "a/2.jpg", "label": "x", "split": 1}\n')
    for path in (csv, lines):
        with pytest.raises(DoubtError, match=rf"{path.name}: .* 'split' has splits"):
            scan(path)
    found = scan(Table(csv, split_column="split"))
    assert list(found.splits) == ["0", "1"]
    assert scan(Table(lines, split_column="split")).splits == found.splits


def test_odd_names_are_kept_byte_for_byte(tmp_path: Path) -> None:
    names = [b"\xff\xfe.jpg", "été.jpg".encode(), b"a;b.jpg", b"a\\b.jpg", b"#1.jpg", b"~.jpg"]
    put(tmp_path, *names)
    found = listed(tmp_path, b"".join(name + b" 0\n" for name in names))
    assert rows(found) == [(name, 0) for name in names]
    assert {found.origin.read(source) for source in found.splits["train"]} == {b"x"}


def test_keys_are_relative_to_the_list_wherever_paths_begin(folder: Path) -> None:
    put(folder, "deep/5.jpg", "elsewhere/6.jpg")
    (folder / "lists").mkdir()
    text = f"./a//1.jpg 0\n{folder}/a/2.jpg 1\na/../b/3.jpg 2\n../{folder.name}/c/4.jpg 3\n"
    found = listed(folder, text)
    assert [key for key, _ in rows(found)] == [b"a/1.jpg", b"a/2.jpg", b"b/3.jpg", b"c/4.jpg"]
    assert [found.origin.read(source) for source in found.splits["train"]] == [b"x"] * 4
    text = f"../a/1.jpg 0\n{folder}/a/2.jpg 1\n"
    with pytest.raises(SourceError, match="2 lines are wrong") as refused:
        listed(folder / "lists", text)
    assert "../a/1.jpg" in str(refused.value)
    assert "--root" in str(refused.value)
    outside = listed(folder / "lists", text, root=folder / "lists")
    assert [key for key, _ in rows(outside)] == [b"../a/1.jpg", os.fsencode(folder / "a/2.jpg")]
    assert [outside.origin.read(source) for source in outside.splits["train"]] == [b"x"] * 2
    assert outside.notes[0] == (
        f"2 images outside of SRC, such as '{folder}/a/1.jpg', which is '{folder.resolve()}/a/1.jpg'"
    )


def test_a_file_that_is_not_there_is_a_source_that_is_refused(folder: Path) -> None:
    found = listed(folder, "a/1.jpg 0\ngone.jpg 1\n")
    with pytest.raises(DecodeError, match=r"^unreadable: No such file or directory$"):
        found.origin.read(found.splits["train"][1])
    assert len(rows(listed(folder, f"a/1.jpg 0\n{'a/' * 2000}gone.jpg 1\n"))) == 2


# --- columns that are named or guessed, other labels, other files -----------------------------------------------------


def test_paths_without_labels_are_a_set_without_labels(folder: Path) -> None:
    for text, name in (("a/1.jpg\nmy dog.jpg\n", "list.txt"), ("filename\na/1.jpg\nmy dog.jpg\n", "list.csv")):
        found = listed(folder, text, name)
        assert (rows(found), found.classes) == ([(b"a/1.jpg", None), (b"my dog.jpg", None)], ())
    message = refused(folder, "a/1.jpg\nb/3.jpg dog\n")
    assert "line 2: expected the path of an image, as in other lines, found 'b/3.jpg dog'" in message


def test_a_suffix_that_finds_the_files_is_added_and_the_only_other_column_is_the_label(folder: Path) -> None:
    found = listed(folder, "image_id,breed\n1,pug\n2,akita\n", "train.csv", root=folder / "a")
    assert rows(found) == [(b"1.jpg", 1), (b"2.jpg", 0)]
    assert found.classes == ("akita", "pug")
    assert found.notes == ("train.csv: paths from 'image_id', labels from 'breed'",)
    assert found.origin.read(found.splits["train"][1]) == b"x"


def test_a_path_without_a_suffix_means_one_image(folder: Path) -> None:
    put(folder, "a/5.PNG", "a/1.txt")
    found = listed(folder, "image_id\n5\n1\ngone\n", "l.csv", root=folder / "a")
    assert [key for key, _ in rows(found)] == [b"5.PNG", b"1.jpg", b"gone"]
    put(folder, "a/1.png")
    message = refused(folder, "image_id\n5\n1\n", "l.csv", root=folder / "a")
    assert "line 3: expected the path of one image, and not of '1.jpg' and '1.png', found '1'" in message


def test_names_in_the_first_line_may_be_quoted(folder: Path) -> None:
    found = listed(folder, '"path","a, b"\na/1.jpg,x\na/2.jpg,y\n', "l.csv", label_columns=["a, b"])
    assert (rows(found), found.classes) == ([(b"a/1.jpg", 0), (b"a/2.jpg", 1)], ("x", "y"))


def test_columns_can_be_named(folder: Path) -> None:
    text = "id,where,kind,label,fold\n7,a/1.jpg,x,0,val\n8,b/3.jpg,y,0,train\n9,a/2.jpg,x,0,train\n"
    options: dict[str, Any] = {"path_column": "where", "label_columns": ["kind"], "split_column": "fold"}
    found = listed(folder, text, "l.csv", **options, columns=["id"])
    assert (rows(found), rows(found, "val")) == ([(b"b/3.jpg", 1), (b"a/2.jpg", 0)], [(b"a/1.jpg", 0)])
    assert found.columns is not None
    assert found.columns.values["id"].tolist() == [7, 8, 9]
    for option in ("path_column", "split_column"):
        assert "'gone', found the columns 'id'" in refused(folder, text, "l.csv", **{option: "gone"})
    with pytest.raises(ValueError, match="distinct, found 'id' twice"):
        Table("l.csv", path_column="id", split_column="id")
    with pytest.raises(ValueError, match=r"label_columns must be a list .* found 'id'"):
        Table("l.csv", label_columns="id")


LABELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...], list[Any]]] = {
    "numbers": ("path,label\na/1.jpg,0.5\na/2.jpg,-3\n", {}, (), [(0.5,), (-3.0,)]),
    "columns of 0 and 1": (
        "path,sky,sea\na/1.jpg,1,0\na/2.jpg,1,1\n",
        {"label_columns": ["sky", "sea"]},
        ("sky", "sea"),
        [(1.0, 0.0), (1.0, 1.0)],
    ),
    "integers": ("path,label\na/1.jpg,2\na/2.jpg,0\n", {}, ("0", "1", "2"), [2, 0]),
    "JSON integers": ('{"path": "a/1.jpg", "label": 1}\n{"path": "a/2.jpg", "label": 0}\n', {}, ("0", "1"), [1, 0]),
    "JSON names": (
        '{"file_name": "a/1.jpg", "label": "x"}\n\n{"file_name": "a/2.jpg", "label": "y"}',
        {},
        ("x", "y"),
        [0, 1],
    ),
    "JSON lists": (
        '{"path": "a/1.jpg", "label": [1, 0.5]}\n{"path": "a/2.jpg", "label": [0, 1]}',
        {},
        (),
        [(1.0, 0.5), (0.0, 1.0)],
    ),
    "whole numbers of pandas": ("path,label\na/1.jpg,2.0\na/2.jpg,1.0\n", {}, ("0", "1", "2"), [2, 1]),
    "several in a cell": (
        "path,label\na/1.jpg,sea sky\na/2.jpg, sky  sun\n",
        {"label_separator": " "},
        ("sea", "sky", "sun"),
        [(1.0, 1.0, 0.0), (0.0, 1.0, 1.0)],
    ),
    "several integers in a cell": (
        "path,label\na/1.jpg,0|2\na/2.jpg,2\n",
        {"label_separator": "|"},
        ("0", "1", "2"),
        [(1.0, 0.0, 1.0), (0.0, 0.0, 1.0)],
    ),
    "JSON lists of names": (
        '{"path": "a/1.jpg", "label": ["y"]}\n{"path": "a/2.jpg", "label": ["x", "y"]}',
        {},
        ("x", "y"),
        [(0.0, 1.0), (1.0, 1.0)],
    ),
    "JSON truth": ('{"path": "a/1.jpg", "label": true}\n{"path": "a/2.jpg", "label": false}', {}, ("0", "1"), [1, 0]),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels_are_classes_integers_numbers_or_vectors(name: str, folder: Path) -> None:
    text, options, classes, labels = LABELS[name]
    found = listed(folder, text, "table", **options)
    assert (found.classes, [label for _, label in rows(found)]) == (classes, labels)


# Columns of two rows, and the options of each reading of the doubt; "" if there is no doubt.
DOUBTS: dict[str, tuple[str, str]] = {
    "text": ("breed pug akita", ""),
    "an integer": ("grade 0 1", "--label-column grade / --labels none"),
    "a number": ("age 0.5 3", "--label-column age / --labels none"),
    "several columns": ("age 20 30 / breed x y", "--label-column age / --label-column breed / --labels none"),
    "two names of labels": ("Class x y / target x y", "--label-column Class / --label-column target / --labels none"),
    "two cases of a name": ("label x y / Label x y", "--label-column label / --label-column Label / --labels none"),
    "the index of pandas": ("Unnamed: 0 0 1 / breed x y", ""),
    "a split": ("label x y / Data Set train test", "--split-column 'Data Set' / --split-column none"),
    "a split of a competition": ("label x y / a Training PublicTest", "--split-column a / --split-column none"),
    "a split with a gap": ("label x y / part NULL val", "--split-column part / --split-column none"),
    "only a split": ("Usage train test", "--split-column Usage / --split-column none"),
    "a fold": ("label x y / k_fold 0 1", "--split-column k_fold / --split-column none"),
    "a flag": ("label x y / is_train 1 0", "--split-column is_train / --split-column none"),
    "other values": ("label x y / source train tram", ""),
    "only train": ("label x y / part train training", ""),
    "whole numbers with gaps": ("label 3.0 5.0", "--labels classes / --labels numbers"),
    "exponents": ("label 1e5 2e5", "--labels classes / --labels numbers"),
    "fractions": ("label 3.0 5.5", ""),
    "two ways to write a number": ("label 01 1", "--labels classes / --labels numbers"),
    "a code that may be a number": ("label 1e5 2b3", "--labels classes"),
    "digits and letters": ("label 7 x", "--labels classes"),
    "codes with zeros": ("label 001 00a", "--labels classes"),
}


@pytest.mark.parametrize("name", DOUBTS)
def test_what_a_column_means_is_a_doubt_with_commands(name: str, folder: Path) -> None:
    text, expected = DOUBTS[name]
    columns = [re.fullmatch(r"(.+) (\S+) (\S+)", column) for column in text.split(" / ")]
    lines = (",".join(cells) for cells in zip(*(match.groups() for match in columns if match), strict=True))
    (folder / "t.csv").write_text("\n".join(map(",".join, zip(("path", "a/1.jpg", "a/2.jpg"), lines, strict=True))))
    src = folder / "t.csv"
    with pytest.raises(DoubtError) if expected else contextlib.nullcontext() as caught:
        collect(src, ConvertOptions())
    if caught is not None:
        assert [shlex.join(command[3:]) for command in caught.value.commands] == expected.split(" / ")


def test_columns_may_be_separated_by_spaces_below_their_names(folder: Path) -> None:
    (folder / "list.txt").write_text("image_id class_id super_class_id path\n1 7 1 a/1.jpg\n2 3 1 a/2.jpg\n")
    found = collect(Table(folder / "list.txt", label_columns=["class_id"]), ConvertOptions())
    assert [label for _, label in rows(found)] == [7, 3]
    (folder / "image class 1.jpg").write_bytes((folder / "a/1.jpg").read_bytes())
    (folder / "list.txt").write_text("image class 1.jpg 0\na/1.jpg 1\n")
    assert [label for _, label in rows(collect(folder / "list.txt", ConvertOptions()))] == [0, 1]


CELLS: dict[str, tuple[str, dict[str, Any], tuple[str, ...], list[Any]]] = {
    "classes with gaps": ("3.0 1.0", {"labels": "classes"}, ("0", "1", "2", "3"), [3, 1]),
    "integers as numbers": ("3 1", {"labels": "numbers"}, (), [(3.0,), (1.0,)]),
    "two ways to write a number": ("01 1", {"labels": "classes"}, ("01", "1"), [0, 1]),
    "codes": ("2b3 1e5", {"labels": "classes"}, ("1e5", "2b3"), [1, 0]),
    "missing": ("x NaN", {"unlabeled": "skip", "labels": "classes"}, ("x",), [0]),
    "empty": ("NULL x", {"unlabeled": "skip"}, ("x",), [0]),
}


@pytest.mark.parametrize("name", CELLS)
def test_options_say_what_a_cell_means(name: str, folder: Path) -> None:
    text, options, classes, labels = CELLS[name]
    one, other = text.split()
    (folder / "t.csv").write_text(f"path,label\na/1.jpg,{one}\na/2.jpg,{other}\n")
    found = collect(folder / "t.csv", ConvertOptions(**options))
    assert (found.classes, [label for _, label in rows(found)]) == (classes, labels)
    assert sum(found.ignored.values()) == 2 - len(labels)


@pytest.mark.parametrize(
    ("cells", "labels", "classes", "expected"),
    [
        ("[1, 2] [0, 2]", "classes", ("0", "1", "2"), [(0, 1, 1), (1, 0, 1)]),
        ("[1, 2] [0, 2]", "numbers", (), [(1, 2), (0, 2)]),
        ('["1","0.5"] [0,2]', "numbers", (), [(1, 0.5), (0, 2)]),
        ('["0.25","0.75"] ["1","0"]', None, (), [(0.25, 0.75), (1, 0)]),
    ],
)
def test_options_say_what_lists_mean(
    cells: str, labels: Any, classes: tuple[str, ...], expected: list[Any], folder: Path
) -> None:
    lines = (f'{{"path": "a/{n}.jpg", "label": {cell}}}' for n, cell in enumerate(re.findall(r"\[.*?\]", cells), 1))
    (folder / "t.jsonl").write_text("\n".join(lines))
    found = collect(folder / "t.jsonl", ConvertOptions(labels=labels))
    assert (found.classes, [label for _, label in rows(found)]) == (classes, expected)
    assert f"labels are float32, {len(expected[0])} numbers each" in found.notes


def test_names_in_both_unicode_forms_are_one_class(folder: Path) -> None:
    found = listed(folder, f"path,label\na/1.jpg,{NFC}x\na/2.jpg,{NFD}x\nb/3.jpg,a\n", "l.csv")
    assert (found.classes, [label for _, label in rows(found)]) == ((f"{NFC}x", "a"), [0, 0, 1])
    text = f"path,label\na/1.jpg,{NFC}x\na/2.jpg,{NFD}x a\n"
    assert listed(folder, text, "l.csv", label_separator=" ").classes == (f"{NFC}x", "a")


def test_texts_in_parquet_may_be_bytes(folder: Path) -> None:
    table = pa.table({"path": [b"a/1.jpg", b"a/2.jpg"], "label": [b"x", b"y"], "split": [b"train", None]})
    pq.write_table(table, folder / "t.parquet")
    found = collect(folder, ConvertOptions(table=folder / "t.parquet"))
    assert (rows(found), found.classes) == ([(b"a/1.jpg", 0), (b"a/2.jpg", 1)], ("x", "y"))


def test_a_row_without_a_label_is_a_doubt(folder: Path) -> None:
    (folder / "t.csv").write_text("path,label\na/1.jpg,x\na/2.jpg,n/a\n")
    with pytest.raises(DoubtError, match=r"a/2\.jpg") as caught:
        collect(folder / "t.csv", ConvertOptions())
    assert [command[3:] for command in caught.value.commands] == [("--unlabeled", "skip"), ("--labels", "none")]


def test_several_labels_in_some_cells_are_a_doubt(folder: Path) -> None:
    with pytest.raises(DoubtError, match=r"'x\|y' beside its parts") as caught:
        listed(folder, "path,label\na/1.jpg,x\na/2.jpg,x|y\nb/3.jpg,y\n", "l.csv")
    assert [command[3:] for command in caught.value.commands] == [("--labels", "classes"), ("--label-separator", "|")]
    assert listed(folder, "path,label\na/1.jpg,x\na/2.jpg,x|z\nb/3.jpg,y\n", "l.csv").classes == ("x", "x|z", "y")
    with pytest.raises(SourceError, match="expected 2 to 10,000 different labels"):
        listed(folder, "path,label\na/1.jpg,x\n", "l.csv", label_separator=" ")
    with pytest.raises(ValueError, match="label_separator is for one column"):
        Table("l.csv", label_columns=["a", "b"], label_separator=" ")


def test_the_commands_of_a_doubt_keep_what_the_caller_gave(folder: Path) -> None:
    (folder / "t.csv").write_text("where,n,a\na/1.jpg,1e5,train\na/2.jpg,2e5,test\n")
    with pytest.raises(DoubtError) as caught:
        collect(folder, ConvertOptions(table={"val": Table(folder / "t.csv", path_column="where", columns=["n"])}))
    words = ("convert", str(folder), "OUT", "--table", f"val={folder / 't.csv'}", "--path-column", "where")
    assert caught.value.commands[0] == (*words, "--column", "n", "--split-column", "a")


def test_unused_columns_and_many_different_texts(folder: Path) -> None:
    found = listed(folder, "path,label,width,height\na/1.jpg,x,3,4\n", "l.csv")
    assert found.notes == ("l.csv: paths from 'path', labels from 'label', not used: 'width', 'height'",)
    put(folder, *(f"{i}.jpg" for i in range(30)))
    with pytest.raises(DoubtError, match="30 different texts"):
        listed(folder, "path,caption\n" + "".join(f"{i}.jpg,text {i}\n" for i in range(30)), "l.csv")


def test_a_flag_is_a_split_and_an_empty_cell_is_train_unless_the_folder_says_another(folder: Path) -> None:
    text = "path,label,is_valid\na/1.jpg,x,1\na/2.jpg,x,0\n"
    assert list(listed(folder, text, "l.csv", split_column="is_valid").splits) == ["train", "val"]
    put(folder, "val/1.jpg")
    text = "path,label,split\na/1.jpg,x,val\na/2.jpg,x,\n"
    for cell in ("", "NaN"):
        assert rows(listed(folder, text.replace("x,\n", f"x,{cell}\n"), "l.csv")) == [(b"a/2.jpg", 0)]
    with pytest.raises(DoubtError, match=r"line 4: expected a split, as the folder of 'val/1\.jpg' says 'val'"):
        listed(folder, text + "val/1.jpg,x,\n", "l.csv")
    (folder / "l.csv").write_text(text)
    with pytest.raises(SourceError, match="line 2: expected the split 'test', for which the table is given"):
        collect(folder, ConvertOptions(labels="none", table={"test": folder / "l.csv"}))


def test_rows_of_a_group_are_on_one_side_of_val(folder: Path) -> None:
    put(folder, *(f"{i}.jpg" for i in range(40)))
    text = "path,label,patient\n" + "".join(f"{i}.jpg,x,{i // 4}\n" for i in range(40))
    (folder / "l.csv").write_text(text)
    table = Table(folder / "l.csv", group_column="patient")
    found = collect(table, ConvertOptions(val=0.4))
    groups = {split: {int(key[:-4]) // 4 for key, _ in rows(found, split)} for split in ("train", "val")}
    assert groups["train"].isdisjoint(groups["val"])
    assert len(groups["train"] | groups["val"]) == 10
    with pytest.raises(ValueError, match="`val`"):
        collect(table, ConvertOptions())
    (folder / "l.csv").write_text(text.replace(",9\n", ",\n"))
    with pytest.raises(SourceError, match="line 38: expected a group"):
        collect(table, ConvertOptions(val=0.4))


@pytest.mark.parametrize(
    ("label", "options"),
    [("x", {}), ("3", {"labels": "numbers"}), ("2b3", {"labels": "classes"}), ("3.0", {"labels": "classes"})],
)
def test_a_set_is_repaired_with_its_table(label: str, options: dict[str, Any], tmp_path: Path) -> None:
    put(tmp_path, *(f"{i}.jpg" for i in range(12)), content=random_jpeg(0, 9, 9))
    cells = [f"{i}.jpg,{label if i % 3 else '5e1'},{i // 3}" for i in range(11)]
    (tmp_path / "l.csv").write_text("\n".join(["path,label,patient", *cells, "11.jpg,NA,4"]))
    table, out = Table(tmp_path / "l.csv", group_column="patient"), tmp_path / "out"
    options = {"labels": "classes", **options, "val": 0.5, "unlabeled": "skip", "size": 8, "workers": 1}
    report = convert(table, out, **options)
    assert sum(report.num_samples.values()) == 11
    assert report.ignored == {"image without a label": 1}
    (out / "val-00000.npy").unlink()
    assert repair(out, table, workers=1).repaired == ("val-00000.npy",)


def test_a_split_may_be_without_labels(folder: Path) -> None:
    found = listed(folder, "path,label,split\na/1.jpg,x,train\na/2.jpg,,test\nb/3.jpg,,test\n", "l.csv")
    assert (rows(found), rows(found, "test")) == ([(b"a/1.jpg", 0)], [(b"a/2.jpg", None), (b"b/3.jpg", None)])


# --- tables that describe the images of a collection ------------------------------------------------------------------


def described(folder: Path, src: Path, text: str, **options: Any) -> Collection:
    (folder / "table.csv").write_text(text)
    return collect(src, ConvertOptions(table=Table(folder / "table.csv", **options)))


def test_a_table_with_labels_lists_the_images_of_a_folder(tmp_path: Path) -> None:
    put(tmp_path / "src", "1.jpg", "2.png", "3.jpg")
    found = described(tmp_path, tmp_path / "src", "id,label,split\n1,x,train\n2.png,y,val\n4,y,train\n")
    assert (rows(found), rows(found, "val")) == ([(b"1.jpg", 0), (b"4", 1)], [(b"2.png", 1)])
    assert found.ignored == {"image in no table": 1}
    with pytest.raises(DecodeError, match=r"incomplete: expected an image at this path in SRC, as table\.csv"):
        found.origin.read(found.splits["train"][1])
    with pytest.raises(SourceError, match=r"such as '1\.jpg', .* such as 'x/1\.jpg'"):
        described(tmp_path, tmp_path / "src", "path,label\nx/1.jpg,a\n")


def test_a_path_that_two_images_may_have_is_an_error(tmp_path: Path) -> None:
    put(tmp_path / "src", "1.jpg", "1.png", "2.jpg")
    assert rows(described(tmp_path, tmp_path / "src", "id,label\n1.png,x\n2,y\n")) == [(b"1.png", 0), (b"2.jpg", 1)]
    with pytest.raises(SourceError, match=r"(?s)table\.csv.*line 3: .* not of '1\.jpg' and '1\.png', found '1'"):
        described(tmp_path, tmp_path / "src", "id,label\n2,y\n1,x\n")


def test_a_missing_image_belongs_to_the_split_in_its_path(tmp_path: Path) -> None:
    put(tmp_path / "src", "train/1.jpg", "Val/2.jpg")
    found = described(tmp_path, tmp_path / "src", "path,label\ntrain/1.jpg,x\nVal/2.jpg,x\nVal/3.jpg,x\n")
    assert {split: len(sources) for split, sources in found.splits.items()} == {"train": 1, "val": 2}


def split_tables(folder: Path, train: str, val: str) -> Collection:
    put(folder / "src", "1.jpg", "2.jpg")
    for name, text in (("train", train), ("val", val)):
        (folder / f"{name}.csv").write_text(text)
    paths = {"train": str(folder / "train.csv"), "val": folder / "val.csv"}
    return collect(folder / "src", ConvertOptions(table=paths))


def test_an_image_is_in_one_table_alone(tmp_path: Path) -> None:
    found = split_tables(tmp_path, "path,label\n1.jpg,x\n", "path,label\n2.jpg,x\n")
    assert (rows(found), rows(found, "val")) == ([(b"1.jpg", 0)], [(b"2.jpg", 0)])
    with pytest.raises(
        SourceError, match=r"(?s)val\.csv.*line 3: .*not in line 2 of train\.csv already, found '1\.jpg'"
    ):
        split_tables(tmp_path, "path,label\n1.jpg,x\n", "path,label\n2.jpg,x\n1.jpg,x\n")


def test_tables_of_splits_have_the_same_columns_of_labels_in_the_same_order(tmp_path: Path) -> None:
    for name in ("train", "val"):
        put(tmp_path / "src", f"{name}/1.jpg")
        (tmp_path / f"{name}.csv").write_text("path,a,b\n1.jpg,0,1\n")
    for columns, message in (
        (["a", "b"], ""),
        (["b", "a"], "expected labels from a, b, .* found b, a"),
        (["a"], "expected labels from a, b, .* found a"),
    ):
        tables = {
            "train": Table(tmp_path / "train.csv", label_columns=["a", "b"]),
            "val": Table(tmp_path / "val.csv", label_columns=columns),
        }
        with pytest.raises(SourceError, match=message) if message else contextlib.nullcontext():
            collect(tmp_path / "src", ConvertOptions(table=tables))
    tables = {"train": Table(tmp_path / "train.csv", columns=["a"]), "val": Table(tmp_path / "val.csv", columns=[])}
    with pytest.raises(SourceError, match="same `columns`"):
        collect(tmp_path / "src", ConvertOptions(table=tables, labels="none"))


def test_a_column_has_one_type_in_the_tables_of_all_splits(tmp_path: Path) -> None:
    put(tmp_path / "src", "train/1.jpg", "train/2.jpg", "val/1.jpg")
    (tmp_path / "train.csv").write_text("path,n\n2.jpg,7\n1.jpg,8\n")
    (tmp_path / "val.csv").write_text("path,n\n1.jpg,0.5\n")
    tables = {split: Table(tmp_path / f"{split}.csv", columns=["n"]) for split in ("val", "train")}
    found = collect(tmp_path / "src", ConvertOptions(table=tables, labels="none"))
    assert found.columns is not None
    numbers = found.columns.of([b"train/1.jpg", b"train/2.jpg", b"val/1.jpg"])["n"]
    assert (numbers.dtype.str, numbers.tolist()) == ("<f8", [8, 7, 0.5])


def test_a_table_of_each_split_may_leave_out_the_folder_of_the_split(tmp_path: Path) -> None:
    put(tmp_path / "src", "train/1.jpg", "train/2.jpg", "val/1.jpg", "test/1.jpg")
    for split, text in (("train", "path,label\n1.jpg,x\n2.jpg,y\n"), ("val", "path,label\nval/1.jpg,y\n")):
        (tmp_path / f"{split}.csv").write_text(text)
    tables = {split: Table(tmp_path / f"{split}.csv") for split in ("train", "val")}
    found = collect(tmp_path / "src", ConvertOptions(table=tables))
    assert {split: rows(found, split) for split in found.splits} == {
        "train": [(b"train/1.jpg", 0), (b"train/2.jpg", 1)],
        "val": [(b"val/1.jpg", 1)],
        "test": [(b"test/1.jpg", None)],
    }
    (tmp_path / "train.csv").write_text("path,label\n1.jpg,x\ntest/1.jpg,y\n")
    with pytest.raises(SourceError, match=r"(?s)train\.csv.*line 3: expected an image .* no split without a table"):
        collect(tmp_path / "src", ConvertOptions(table=tables))


# The splits that are in class folders or flat, the rows of a table of `val` or `train`, and the labels of each image.
TOLD: dict[str, tuple[str, str, dict[str, str | None] | str]] = {
    "val": ("train/a/1 train/b/2 val/3 val/4", "val 3:b 4:a", {"1": "a", "2": "b", "3": "b", "4": "a"}),
    "val, in folders": ("train/a/1 train/b/2 val/x/3", "val x/3:b", {"1": "a", "2": "b", "3": "b"}),
    "train": ("train/1 train/2 val/a/3 val/b/4", "train 1:a 2:b", {"1": "a", "2": "b", "3": "a", "4": "b"}),
    "both and a test": ("train/a/1 train/b/2 val/3 test/4", "val 3:b", "expected class folders in 'test'"),
    "numbers as names": ("train/10/1 train/9/2 val/3", "val 3:9", {"1": "10", "2": "9", "3": "9"}),
    "an unknown class": ("train/a/1 train/b/2 val/3", "val 3:c", "line 2: expected a known class, found 'c'"),
    "a number": ("train/a/1 train/b/2 val/3", "val 3:0", "line 2: expected a known class, found '0'"),
    "measures": ("train/a/1 train/b/2 val/3", "val 3:0.5", "expected names of classes, as 'train' has"),
    "an unknown folder": (
        "train/1 train/2 val/a/4 val/c/3",
        "train 1:a 2:b",
        "'val/c/3.jpg': expected one of the classes of",
    ),
    "no other labels": ("train/1 val/2", "val 2:b", {"1": None, "2": "b"}),
    "no splits": ("1 2", "val 2:b", {"2": "b"}),
}


@pytest.mark.parametrize("name", TOLD)
@pytest.mark.parametrize("kind", ["images", "arrays"])
def test_a_table_of_one_split_leaves_the_labels_of_others_as_they_are(name: str, kind: str, tmp_path: Path) -> None:
    files, told, expected = TOLD[name]
    suffix, content = (".jpg", b"x") if kind == "images" else (".npy", npy_bytes(np.zeros(3)))
    put(tmp_path / "src", *(f"{file}{suffix}" for file in files.split()), content=content)
    split, *cells = told.split()
    lines = (cell.replace(":", f"{suffix},") for cell in cells)
    (tmp_path / "t.csv").write_text("\n".join(["path,label", *lines]))
    options = ConvertOptions(table={split: tmp_path / "t.csv"})
    if isinstance(expected, str):
        with pytest.raises(SourceError, match=re.escape(expected.replace(".jpg", suffix))):
            collect(tmp_path / "src", options)
        return
    found = collect(tmp_path / "src", options)
    labels = {Path(os.fsdecode(key)).stem: label for split in found.splits for key, label in rows(found, split)}
    assert {key: None if label is None else found.classes[label] for key, label in labels.items()} == expected
    assert found.classes == tuple(sorted({name for name in expected.values() if name}))


def test_tables_above_folders_of_splits_without_classes_are_a_doubt(tmp_path: Path) -> None:
    put(tmp_path, "train/1.jpg", "train/2.jpg", "val/4.jpg", "test/3.jpg")
    for names, given in (("labels.csv", ":labels.csv"), ("train.csv", "train:train.csv")):
        (tmp_path / names).write_text("id,label\n1,x\n2,y\n")
        (tmp_path / "test.csv").write_text("id\n3\n")
        split, _, file = given.partition(":")
        table = f"{split}={tmp_path / file}".lstrip("=")
        with pytest.raises(DoubtError, match=rf"found '{file}' next to them") as caught:
            scan(tmp_path)
        assert [command[3:] for command in caught.value.commands] == [("--table", table), ("--labels", "none")]
    found = collect(tmp_path, ConvertOptions(table={"train": tmp_path / "train.csv"}))
    assert (rows(found), rows(found, "test")) == ([(b"train/1.jpg", 0), (b"train/2.jpg", 1)], [(b"test/3.jpg", None)])


def test_a_table_without_labels_adds_to_the_images_of_class_folders(tmp_path: Path) -> None:
    src = tmp_path / "src"
    put(src, "a/1.jpg", "b/2.jpg")
    found = described(tmp_path, src, "path,n\na/1.jpg,5\nb/2.jpg,6\nb/9.jpg,7\n", columns=["n"])
    assert (rows(found), found.classes) == ([(b"a/1.jpg", 0), (b"b/2.jpg", 1)], ("a", "b"))
    assert found.ignored == {"row without an image": 1}
    with pytest.raises(SourceError, match=r"a row for every image .* 1 of 2 images, such as 'b/2.jpg'"):
        described(tmp_path, src, "path,n\na/1.jpg,5\n", columns=["n"])


def test_lists_of_mxnet_have_a_number_labels_and_a_path(folder: Path) -> None:
    found = listed(folder, "4\t1\ta/1.jpg\n9\t0\tmy dog.jpg\n", "train.lst")
    assert (rows(found), found.classes) == ([(b"a/1.jpg", 1), (b"my dog.jpg", 0)], ("0", "1"))
    text = "4\t1\t0.5\ta/1.jpg\n9\t0\t2\tmy dog.jpg\n"
    assert "'label_0', 'label_1'" in refused(folder, text, "train.lst")
    found = listed(folder, text, "train.lst", label_columns=["label_0", "label_1"])
    assert [label for _, label in rows(found)] == [(1, 0.5), (0, 2)]


def test_a_coco_file_needs_one_category_for_each_image(folder: Path) -> None:
    several = {**COCO, "annotations": [*COCO["annotations"], {"image_id": 7, "category_id": 1}]}
    assert "'x' and 'y' for 'a/1.jpg'" in (message := refused(folder, json.dumps(several), "a.json"))
    assert "--labels none" in message
    (folder / "a.json").write_text(json.dumps(several))
    unlabeled = list_table(Table(folder / "a.json"), "none").collect("none")
    assert rows(unlabeled) == [(b"a/1.jpg", None), (b"b/3.jpg", None)]
    for name, value, word in (
        ("categories", [{"id": 1, "name": "x"}, {"id": 2, "name": "x"}], "distinct"),
        ("images", [*COCO["images"], {"id": 7, "file_name": "a/2.jpg"}], "distinct"),
        ("images", COCO["images"][:1], "for 3"),
        ("annotations", [{"image_id": 7}], "'category_id'"),
    ):
        assert word in refused(folder, json.dumps({**COCO, name: value}), "a.json")


def test_folders_in_paths_tell_the_split(tmp_path: Path) -> None:
    def splits(*names: str, **options: Any) -> list[str]:
        paths = [f"{name}/{number}.jpg" for number, name in enumerate(names)]
        put(tmp_path, *paths)
        return list(listed(tmp_path, "path,label\n" + "".join(f"{path},x\n" for path in paths), **options).splits)

    assert splits("train/a", "Val/a", "test") == ["train", "val", "test"]
    assert splits("data/a/train", "data/b/test") == ["train", "test"]
    assert splits("val/a", "val/b") == ["val"]
    assert splits("train", "bus", "tram") == ["train"]
    assert splits("data/test/a", "data/test/b") == ["train"]
    assert splits("train", "test", "more", split_column="none") == ["train"]
    with pytest.raises(DoubtError, match=r"list\.txt.*'more/2\.jpg'"):
        splits("train", "test", "more")


# --- paths that are written otherwise than on the disk ----------------------------------------------------------------

NFC, NFD = (unicodedata.normalize(form, "Mü/1.JPG") for form in ("NFC", "NFD"))
WAYS: dict[str, tuple[list[str], list[str], list[str], str]] = {  # pictures, paths in the table, what they mean, a word
    "backslashes": (["a/1.jpg", "a/2.jpg"], ["a\\1.jpg", ".\\a\\2"], ["a/1.jpg", "a/2.jpg"], "2 rows, backslashes"),
    "backslashes on the disk": (["a\\1.jpg"], ["a/1.jpg"], ["a\\1.jpg"], "1 row, backslashes"),
    "blanks": (["a/1.jpg", "a/2.jpg"], ["a/1.jpg ", "a/2.jpg"], ["a/1.jpg", "a/2.jpg"], "1 row, blanks"),
    "a slash": (["a/1.jpg", "2.jpg"], ["/a/1.jpg", "/2"], ["a/1.jpg", "2.jpg"], "2 rows, a slash"),
    "NFC": ([NFD], [NFC], [NFD], "1 row, Unicode"),
    "NFD": ([NFC], [NFD, "x.jpg"], [NFC, "x.jpg"], "1 row, Unicode"),
    "letter case": (["a/1.JPG", "a/2.Png"], ["a/1.jpg", "a/2"], ["a/1.JPG", "a/2.Png"], "1 row, letter case"),
    "a folder of another case": (["Dog/1.jpg", "2.jpg"], ["dog/1.jpg", "2.jpg"], ["Dog/1.jpg", "2.jpg"], "1 row"),
    "all at once": ([NFD], ["\\" + NFC.lower().replace("/", "\\") + " "], [NFD], "1 row, letter case"),
    "names alone": (
        ["a/1.jpg", "b/c/2.png"],
        ["1.jpg", "2"],
        ["a/1.jpg", "b/c/2.png"],
        "2 rows, pictures",
    ),
    "names of another case": (["a/1.jpg", "b/2.jpg"], ["1.JPG", "2.jpg"], ["a/1.jpg", "b/2.jpg"], "1 row, letter case"),
    "exact is best": (["1.jpg", "1.JPG", "a/1.jpg"], ["1.jpg"], ["1.jpg"], ""),
    "one is there": (["1.jpg", "a/2.jpg"], ["1.jpg", "2.jpg"], ["1.jpg", "2.jpg"], ""),
    "another suffix": (["a/1.png", "2.jpg"], ["a/1.jpg", "2.jpg"], ["a/1.jpg", "2.jpg"], ""),
    "another folder": (["a/1.jpg", "2.jpg"], ["b/1.jpg", "2.jpg"], ["b/1.jpg", "2.jpg"], ""),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("is_src", [True, False])
def test_a_path_may_be_written_in_another_way_and_a_note_says_so(name: str, is_src: bool, tmp_path: Path) -> None:
    pictures, paths, meant, word = WAYS[name]
    put(tmp_path / "src", *pictures)
    text = json.dumps([{"path": path, "label": str(n)} for n, path in enumerate(paths)])
    if is_src:
        found = listed(tmp_path, text, "table.csv", root=tmp_path / "src")
    else:
        found = described(tmp_path, tmp_path / "src", text)
    assert rows(found) == [(os.fsencode(path), n) for n, path in enumerate(meant)]
    said = [note for note in found.notes if note.startswith("table.csv: in ")]
    assert bool(said) == bool(word)
    assert any(f"table.csv: in {word}" in note for note in said) or not word
    for source in found.splits["train"]:
        if os.fsdecode(source.key) in pictures:
            assert found.origin.read(source) == b"x"


@pytest.mark.parametrize(
    ("pictures", "path"),
    [
        (["a/1.Jpg", "a/1.JPG"], "a/1.jpg"),
        ([NFC, NFD], NFC.lower()),
        (["a/1.jpg", "b/1.jpg"], "1.jpg"),
        (["a/1.jpg", "b/1.png"], "1"),
        (["a/1.jpg", "a/1.png"], "a\\1"),
    ],
)
def test_no_picture_is_chosen_out_of_two(pictures: list[str], path: str, tmp_path: Path) -> None:
    put(tmp_path / "src", *pictures)
    text = json.dumps([{"path": path, "label": "x"}])
    assert "item 0: expected the path of one image" in refused(tmp_path, text, "table.csv", root=tmp_path / "src")
    with pytest.raises(SourceError, match=r"(?s)table\.csv.*item 0: expected the path of one image"):
        described(tmp_path, tmp_path / "src", text)


def test_names_alone_are_looked_up_in_the_folder_of_the_split_of_the_table(tmp_path: Path) -> None:
    put(tmp_path / "src", "train/a/1.jpg", "train/a/2.jpg", "val/a/1.jpg")
    (tmp_path / "t.csv").write_text("path,label\n1.jpg,x\n2.jpg,y\n")
    (tmp_path / "v.csv").write_text("path,label\n1.jpg,y\n2.jpg,x\n")
    tables: dict[str, Any] = {"train": tmp_path / "t.csv", "val": tmp_path / "v.csv"}
    found = collect(tmp_path / "src", ConvertOptions(table=tables))
    assert rows(found) == [(b"train/a/1.jpg", 0), (b"train/a/2.jpg", 1)]
    assert rows(found, "val") == [(b"val/a/1.jpg", 1), (b"2.jpg", 0)]
    with pytest.raises(DecodeError, match="incomplete"):
        found.origin.read(found.splits["val"][1])


@pytest.mark.parametrize(
    ("old", "new", "paths"),
    [
        ("/old/data", "", ["/old/data/a/1.jpg", "a/2.jpg"]),
        ("/old/data/", "", ["/old/data//a/1.jpg", "a/2.jpg"]),
        ("C:\\data", "", ["C:\\data\\a\\1.jpg", "a\\2.jpg"]),
        ("gs://bucket", "a", ["gs://bucket/1.jpg", "gs://bucket/2.jpg"]),
    ],
)
def test_the_beginning_of_paths_can_be_replaced(old: str, new: str, paths: list[str], tmp_path: Path) -> None:
    src = tmp_path / "src"
    put(src, "a/1.jpg", "a/2.jpg")
    text = "path,label\n" + "".join(f"{path},{n}\n" for n, path in enumerate(paths))
    found = listed(tmp_path, text, "t.csv", root=f"{old}={src / new}")
    assert [found.origin.read(source) for source in found.splits["train"]] == [b"x"] * 2
    assert any("replaced" in note for note in found.notes)
    assert rows(described(tmp_path, src, text, root=f"{old}={new}")) == [(b"a/1.jpg", 0), (b"a/2.jpg", 1)]
    assert "begin with '/old/dat'" in refused(tmp_path, text, "t.csv", root=f"/old/dat={src}")


def test_a_root_with_an_equals_sign_may_be_a_folder(tmp_path: Path) -> None:
    put(tmp_path / "a=b", "1.jpg")
    assert rows(listed(tmp_path, "path,label\n1.jpg,0\n", "t.csv", root=tmp_path / "a=b")) == [(b"1.jpg", 0)]


# --- faults -----------------------------------------------------------------------------------------------------------


def test_every_fault_is_named_with_its_line_at_once(folder: Path) -> None:
    message = refused(folder, "a/1.jpg 0\na/2.jpg\na/1.jpg 1\nb/3.jpg x\n\nc/4.jpg -1\n./a/1.jpg 0\nmy dog.jpg 2\n")
    assert message.splitlines() == [
        f"{folder / 'list.txt'}: 5 lines are wrong:",
        "  line 2: expected `PATH LABEL`, or columns named in the first line, found 'a/2.jpg'",
        "  line 3: expected a path that is not in line 1 already, found 'a/1.jpg'",
        "  line 4: expected an integer, as other labels are, found 'x'",
        "  line 6: expected a class name, or an integer from 0 to 1,048,575, found '-1'",
        "  line 7: expected a path that is not in line 1 already, found './a/1.jpg'",
    ]


def test_the_first_of_very_many_faults_are_shown_and_all_are_counted(folder: Path) -> None:
    message = refused(folder, "a/1.jpg 0\n" + "nothing\n" * 50_000)
    assert message.splitlines()[1].startswith("  line 2: ")
    assert message.splitlines()[10].startswith("  line 11: ")
    assert message.splitlines()[11:] == ["  and 49,990 more"]
