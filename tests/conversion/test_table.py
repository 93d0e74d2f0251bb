"""Tables and lists of images: what their rows mean, and every fault with its line."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import json
import os
import re
import shlex
import unicodedata
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
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
from shardio.conversion.sources.rows import read_rows
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


def test_a_line_is_a_path_and_a_label_which_is_the_last_word_or_comes_after_a_tab(folder: Path) -> None:
    found = listed(folder, "b/3.jpg 1\na/1.jpg   0\r\n\nmy dog.jpg\t2  \na/2.jpg 0")
    assert rows(found) == [(b"b/3.jpg", 1), (b"a/1.jpg", 0), (b"my dog.jpg", 2), (b"a/2.jpg", 0)]
    assert (found.classes, found.kind, list(found.splits)) == (("0", "1", "2"), "list", ["train"])
    put(folder, "0.jpg", "2.jpg")
    found = listed(folder, "0 0\na/1.jpg 1\n2 0\nmy dog\t1\n")
    assert rows(found) == [(b"0.jpg", 0), (b"a/1.jpg", 1), (b"2.jpg", 0), (b"my dog.jpg", 1)]
    found = listed(folder, "a/1.jpg\tgreat white shark\nmy dog.jpg\tdog\n")
    assert (rows(found), found.classes) == ([(b"a/1.jpg", 1), (b"my dog.jpg", 0)], ("dog", "great white shark"))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("path,label\na/1.jpg,x\nb/3.jpg,y\n", "list.csv"),
        ("label,path\nx,a/1.jpg\ny,b/3.jpg\n", "list.csv"),
        ("id,FileName,Class,width\n7,a/1.jpg,x,20\n8,b/3.jpg,y,30\n", "list.csv"),
        ("image\ttarget\na/1.jpg\tx\nb/3.jpg\ty\n", "list.tsv"),
        ('"path","label"\n"a/1.jpg","x"\n"b/3.jpg","y"\n', "list.csv"),
        ("\ufeffpath , label\r\na/1.jpg,x\r\nb/3.jpg,y\r\n", "list.csv"),
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
        ("image_id,breed\na/1,x\nb/3,y\n", "list.csv"),
    ],
)
def test_columns_are_found_by_name(text: str | bytes, name: str, folder: Path) -> None:
    found = listed(folder, text, name)
    assert rows(found) == [(b"a/1.jpg", 0), (b"b/3.jpg", 1)]
    assert found.classes == ("x", "y")


def test_a_column_tells_the_split(folder: Path) -> None:
    text = "path,label,split\na/1.jpg,x,train\nc/4.jpg,x,fold_1\na/2.jpg,y,Validation\nb/3.jpg,x,test\nb/5.jpg,y,train"
    found = listed(folder, text, "list.csv")
    assert [(split, rows(found, split)) for split in found.splits] == [
        ("train", [(b"a/1.jpg", 0), (b"b/5.jpg", 1)]),
        ("val", [(b"a/2.jpg", 1)]),
        ("test", [(b"b/3.jpg", 0)]),
        ("fold_1", [(b"c/4.jpg", 0)]),
    ]


def test_odd_names_are_kept_byte_for_byte(tmp_path: Path) -> None:
    names = [b"\xff\xfe.jpg", "été.jpg".encode(), b"a;b.jpg", b"a\\b.jpg", b"#1.jpg", b"~.jpg"]
    quoted = [*names, b'a "b", c\nd.jpg', b" lead.jpg"]
    put(tmp_path, *quoted)
    csv = b"path,label\n" + b"".join(b'"%s","x, y"\n' % name.replace(b'"', b'""') for name in quoted)
    for text, some in ((b"".join(name + b" 0\n" for name in names), names), (csv, quoted)):
        found = listed(tmp_path, text)
        assert rows(found) == [(name, 0) for name in some]
        assert {found.origin.read(source) for source in found.splits["train"]} == {b"x"}
    assert found.classes == ("x, y",)


def test_keys_are_relative_to_the_list_wherever_paths_begin(folder: Path) -> None:
    (folder / "lists").mkdir()
    text = f"./a//1.jpg 0\n{folder}/a/2.jpg 1\na/../b/3.jpg 2\n../{folder.name}/c/4.jpg 3\n"
    found = listed(folder, text)
    assert [key for key, _ in rows(found)] == [b"a/1.jpg", b"a/2.jpg", b"b/3.jpg", b"c/4.jpg"]
    assert [found.origin.read(source) for source in found.splits["train"]] == [b"x"] * 4
    text = f"../a/1.jpg 0\n{folder}/a/2.jpg 1\n"
    assert re.search(r"(?s)2 lines are wrong.*--root.*\.\./a/1\.jpg", refused(folder / "lists", text))
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


def test_paths_without_labels_are_a_split_without_labels(folder: Path) -> None:
    for text, name in (("a/1.jpg\nmy dog.jpg\n", "list.txt"), ("filename\na/1.jpg\nmy dog.jpg\n", "list.csv")):
        found = listed(folder, text, name)
        assert (rows(found), found.classes) == ([(b"a/1.jpg", None), (b"my dog.jpg", None)], ())
    found = listed(folder, "path,label,split\na/1.jpg,x,train\na/2.jpg,,test\nb/3.jpg,,test\n", "l.csv")
    assert (rows(found), rows(found, "test")) == ([(b"a/1.jpg", 0)], [(b"a/2.jpg", None), (b"b/3.jpg", None)])
    message = refused(folder, "a/1.jpg\nb/3.jpg dog\n")
    assert "line 2: expected the path of an image, as in other lines, found 'b/3.jpg dog'" in message


def test_columns_can_be_named(folder: Path) -> None:
    text = "id,where,kind,label,fold\n7,a/1.jpg,x,0,val\n8,b/3.jpg,y,0,train\n9,a/2.jpg,x,0,train\n"
    options: dict[str, Any] = {"path_column": "where", "label_columns": ["kind"], "split_column": "fold"}
    found = listed(folder, text, "l.csv", **options, columns=["id"])
    assert (rows(found), rows(found, "val")) == ([(b"b/3.jpg", 1), (b"a/2.jpg", 0)], [(b"a/1.jpg", 0)])
    assert found.columns is not None
    assert found.columns.values["id"].tolist() == [7, 8, 9]
    text_of_two = '"path","a, b",sea\na/1.jpg,1,0\na/2.jpg,1,1\n'
    found = listed(folder, text_of_two, "l.csv", label_columns=["a, b", "sea"])
    assert (found.classes, [label for _, label in rows(found)]) == (("a, b", "sea"), [(1, 0), (1, 1)])
    assert "fill in empty cells" in refused(folder, "path,a,b\na/1.jpg,1,\n", "l.csv", label_columns=["a", "b"])
    for option in ("path_column", "split_column"):
        assert "'gone', found the columns 'id'" in refused(folder, text, "l.csv", **{option: "gone"})
    with pytest.raises(ValueError, match="distinct, found 'id' twice"):
        Table("l.csv", path_column="id", split_column="id")
    with pytest.raises(ValueError, match=r"label_columns must be a list .* found 'id'"):
        Table("l.csv", label_columns="id")


# The cells of two rows, or the items of two objects, the options, and the classes and labels that this gives.
LABELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...], list[Any]]] = {
    "numbers": ("0.5 / -3", {}, (), [(0.5,), (-3.0,)]),
    "integers": ("2 / 0", {}, ("0", "1", "2"), [2, 0]),
    "whole numbers of pandas": ("2.0 / 1.0", {}, ("0", "1", "2"), [2, 1]),
    "classes with gaps": ("3.0 / 1.0", {"labels": "classes"}, ("0", "1", "2", "3"), [3, 1]),
    "integers as numbers": ("3 / 1", {"labels": "numbers"}, (), [(3.0,), (1.0,)]),
    "two ways to write a number": ("01 / 1", {"labels": "classes"}, ("01", "1"), [0, 1]),
    "codes": ("2b3 / 1e5", {"labels": "classes"}, ("1e5", "2b3"), [1, 0]),
    "missing": ("x / NaN", {"unlabeled": "skip", "labels": "classes"}, ("x",), [0]),
    "empty": ("NULL / x", {"unlabeled": "skip"}, ("x",), [0]),
    "several": ("sea sky /  sky  sun", {"label_separator": " "}, ("sea", "sky", "sun"), [(1, 1, 0), (0, 1, 1)]),
    "several integers": ("0 | 2 / 2", {"label_separator": "|"}, ("0", "1", "2"), [(1, 0, 1), (0, 0, 1)]),
    "JSON integers": ("[1, 0]", {}, ("0", "1"), [1, 0]),
    "JSON truth": ("[true, false]", {}, ("0", "1"), [1, 0]),
    "JSON lists": ("[[1, 0.5], [0, 1]]", {}, (), [(1.0, 0.5), (0.0, 1.0)]),
    "JSON lists of names": ('[["y"], ["x", "y"]]', {}, ("x", "y"), [(0.0, 1.0), (1.0, 1.0)]),
    "lists of classes": ("[[1, 2], [0, 2]]", {"labels": "classes"}, ("0", "1", "2"), [(0, 1, 1), (1, 0, 1)]),
    "lists of numbers": ("[[1, 2], [0, 2]]", {"labels": "numbers"}, (), [(1, 2), (0, 2)]),
    "numbers as texts, too": ('[["1", "0.5"], [0, 2]]', {"labels": "numbers"}, (), [(1, 0.5), (0, 2)]),
    "numbers as texts": ('[["0.25", "0.75"], ["1", "0"]]', {}, (), [(0.25, 0.75), (1, 0)]),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels_are_classes_integers_numbers_or_vectors(name: str, folder: Path) -> None:
    text, options, classes, labels = LABELS[name]
    if text.startswith("["):
        objects = ({"path": f"a/{number}.jpg", "label": one} for number, one in enumerate(json.loads(text), 1))
        (folder / "table").write_text("\n".join(map(json.dumps, objects)))
    else:
        (folder / "table").write_text("path,label\na/1.jpg,{}\na/2.jpg,{}\n".format(*text.split(" / ")))
    given = {"label_separator": "", **options}
    found = collect(Table(folder / "table", label_separator=given.pop("label_separator")), ConvertOptions(**given))
    assert (found.classes, [label for _, label in rows(found)]) == (classes, labels)
    assert sum(found.ignored.values()) == 2 - len(labels)
    assert ("labels are float32" in found.notes[-1]) == isinstance(labels[0], tuple)


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
    "no label": ("label x n/a", "--unlabeled skip / --labels none"),
    "numbers of splits": ("label x y / split 0 1", "--split-column split / --split-column none"),
    "a set of other things": ("label x y / set Jungle Fossil", "--split-column set / --split-column none"),
    "a subset of known names": ("label x x / subset train val", ""),
    "a flag without is": ("label x y / test 0 1", "--split-column test / --split-column none"),
    "two flags": (
        "label x y / train True False / valid 0 1",
        "--split-column train / --split-column valid / --split-column none",
    ),
    "a test of other things": ("label x y / test blood urine", ""),
    "one text": ("source web web", "--label-column source / --labels none"),
    "one class": ("label x x", ""),
    "a negative number": ("label -1 1", "--labels numbers / --labels none"),
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


def test_names_in_both_unicode_forms_are_one_class(folder: Path) -> None:
    found = listed(folder, f"path,label\na/1.jpg,{NFC}x\na/2.jpg,{NFD}x\nb/3.jpg,a\n", "l.csv")
    assert (found.classes, [label for _, label in rows(found)]) == ((f"{NFC}x", "a"), [0, 0, 1])
    text = f"path,label\na/1.jpg,{NFC}x\na/2.jpg,{NFD}x a\n"
    assert listed(folder, text, "l.csv", label_separator=" ").classes == (f"{NFC}x", "a")


def test_a_number_written_in_two_ways_among_several_labels_is_a_doubt(folder: Path) -> None:
    text = "path,label\na/1.jpg,01 2\na/2.jpg,1\nb/3.jpg,2\n"
    with pytest.raises(DoubtError, match="'01', '1'") as caught:
        listed(folder, text, "l.csv", label_separator=" ")
    assert [command[-2:] for command in caught.value.commands] == [("--labels", "classes")]
    found = collect(Table(folder / "l.csv", label_separator=" "), ConvertOptions(labels="classes"))
    assert found.classes == ("01", "1", "2")


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
    text_of_test = text.replace("is_valid", "Test")
    assert rows(listed(folder, text_of_test, "l.csv", split_column="Test"), "test") == [(b"a/1.jpg", 0)]
    text = '{"path": "a/1.jpg", "split": 0}\n{"path": "a/2.jpg", "split": 1}\n'
    assert list(listed(folder, text, split_column="split").splits) == ["0", "1"]
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
    put(tmp_path / "splits", "train/1.jpg", "Val/2.jpg")
    found = described(tmp_path, tmp_path / "splits", "path,label\ntrain/1.jpg,x\nVal/2.jpg,x\nVal/3.jpg,x\n")
    assert {split: len(sources) for split, sources in found.splits.items()} == {"train": 1, "val": 2}


def tables(folder: Path, texts: Mapping[str, str], **options: Any) -> dict[str, Any]:
    """Writes a table for each split."""
    for split, text in texts.items():
        (folder / f"{split}.csv").write_text(text)
    return {split: Table(folder / f"{split}.csv", **options) for split in texts}


def test_tables_of_splits_have_the_same_columns_in_the_same_order(tmp_path: Path) -> None:
    put(tmp_path / "src", "train/1.jpg", "val/1.jpg")
    texts = dict.fromkeys(("train", "val"), "path,a,b\n1.jpg,0,1\n")
    train, val = tables(tmp_path, texts).values()
    for name, columns, message in (
        ("label_columns", ["a", "b"], ""),
        ("label_columns", ["b", "a"], "expected labels from a, b, .* found b, a"),
        ("label_columns", ["a"], "expected labels from a, b, .* found a"),
        ("columns", ["b"], "same `columns`"),
    ):
        given = {"train": replace(train, **{name: ["a", "b"]}), "val": replace(val, **{name: columns})}
        options = ConvertOptions(table=given, labels="none" if name == "columns" else None)
        with pytest.raises(SourceError, match=message) if message else contextlib.nullcontext():
            collect(tmp_path / "src", options)


@pytest.mark.parametrize("separator", ["|", ""])
def test_tables_of_splits_have_the_same_separator_of_labels(separator: str, tmp_path: Path) -> None:
    put(tmp_path / "src", "train/1.jpg", "val/1.jpg")
    given = tables(tmp_path, dict.fromkeys(("train", "val"), "path,label\n1.jpg,a b|c\n"), label_separator=" ")
    assert collect(tmp_path / "src", ConvertOptions(table=given)).classes == ("a", "b|c")
    given["val"] = replace(given["val"], label_separator=separator)
    with pytest.raises(SourceError, match=r"val.csv: .* label_separator ' '"):
        collect(tmp_path / "src", ConvertOptions(table=given))


def test_a_named_column_of_labels_in_one_table_is_the_only_one(tmp_path: Path) -> None:
    put(tmp_path / "src", "train/1.jpg", "train/2.jpg", "test/3.jpg")

    def labels(train: str, test: str, values: str = "x,7", **options: Any) -> list[int | None]:
        texts = {"train": f"id,{train}\n1,x,0\n2,y,0\n", "test": f"id,{test}\n3,{values}\n"}
        found = collect(tmp_path / "src", ConvertOptions(table=tables(tmp_path, texts, **options)))
        return [label for split in ("train", "test") for _, label in rows(found, split)]

    assert labels("label,age", "patient,age") == [0, 1, None]
    assert labels("Label,age", "label,age") == [0, 1, 0]
    assert labels("kind,age", "kind,age", label_columns=["kind"]) == [0, 1, 0]
    assert labels("class,x", "category,x") == [0, 1, 0]
    assert labels("label,x", "grade", "7") == labels("label,x", "breed", "z") == [0, 1, None]
    for train, test, values, columns in (
        ("label,class", "class,x", "x,7", ["class"]),
        ("class,x", "category,x", "z,7", []),
        ("label,x", "breed", "x", []),
    ):
        name = test.removesuffix(",x")
        with pytest.raises(DoubtError, match=rf"test\.csv: .*'{train[:5]}' in train\.csv and '{name}'") as caught:
            labels(train, test, values)
        words = [*(("--label-column", name) for name in columns), ("--labels", "none")]
        assert [command[7:] for command in caught.value.commands] == words
    with pytest.raises(SourceError, match=r"test\.csv: expected one column 'kind', .* leave this table out"):
        labels("kind,age", "patient,age", label_columns=["kind"])
    with pytest.raises(SourceError, match=r"train\.csv: expected one column 'Kind', .* did you mean kind"):
        labels("kind,age", "kind,age", label_columns=["Kind"])


def test_a_table_whose_guess_is_dropped_is_read_once_and_the_note_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Mock(wraps=read_rows)
    monkeypatch.setattr("shardio.conversion.sources.table.read_rows", read)
    put(tmp_path / "src", "train/1.jpg", "test/3.jpg")
    texts = {"train": "id,label\n1,x\n", "test": "id,age\n3,7\n"}
    found = collect(tmp_path / "src", ConvertOptions(table=tables(tmp_path, texts)))
    assert found.notes[1] == "test.csv: paths from 'id', no labels, not used: 'age'"
    assert read.call_count == 2


def test_flags_beside_labels_that_are_flags_are_no_splits(folder: Path) -> None:
    text = "path,person,car,train\na/1.jpg,1,0,1\na/2.jpg,{},1,0\n"
    assert list(listed(folder, text.format(0), "l.csv", label_columns=["person", "car"]).splits) == ["train"]
    for cell, columns in (("0.5", ["person", "car"]), ("0", ["person"])):
        with pytest.raises(DoubtError, match="'train' has splits"):
            listed(folder, text.format(cell), "l.csv", label_columns=columns)


def test_classes_of_tables_are_the_classes_of_the_first_split(tmp_path: Path) -> None:
    put(tmp_path / "src", "train/1.jpg", "train/2.jpg", "val/3.jpg")
    for label, option, message in (
        ("cat", "classes", ""),
        ("cats", "classes", "'cats'"),
        ("7", None, "'7' in line 2: "),
    ):
        texts = {"train": "id,label\n1,dog\n2,cat\n", "val": f"id,label\n3,{label}\n"}
        options = ConvertOptions(labels=option, table=tables(tmp_path, texts))
        with pytest.raises(SourceError, match=message) if message else contextlib.nullcontext() as caught:
            assert collect(tmp_path / "src", options).classes == ("cat", "dog")
        assert caught is None or str(caught.value).startswith(f"{tmp_path / 'val.csv'}: ")
        assert getattr(caught and caught.value, "commands", ()) == ()


def test_a_column_has_one_type_in_the_tables_of_all_splits(tmp_path: Path) -> None:
    put(tmp_path / "src", "train/1.jpg", "train/2.jpg", "val/1.jpg")
    texts = {"val": "path,n\n1.jpg,0.5\n", "train": "path,n\n2.jpg,7\n1.jpg,8\n"}
    options = ConvertOptions(table=tables(tmp_path, texts, columns=["n"]), labels="none")
    found = collect(tmp_path / "src", options)
    assert found.columns is not None
    numbers = found.columns.of([b"train/1.jpg", b"train/2.jpg", b"val/1.jpg"])["n"]
    assert (numbers.dtype.str, numbers.tolist()) == ("<f8", [8, 7, 0.5])


# The files, with or without splits and class folders; the rows of the tables of splits; and what all images mean.
TOLD: dict[str, tuple[str, str, str]] = {
    "val": ("train/a/1 train/b/2 val/3 val/4", "val 3:b 4:a", "train a/1:a b/2:b; val 3:b 4:a"),
    "val, in folders": ("train/a/1 train/b/2 val/x/3", "val x/3:b", "train a/1:a b/2:b; val x/3:b"),
    "train": ("train/1 train/2 val/a/3 val/b/4", "train 1:a 2:b", "train 1:a 2:b; val a/3:a b/4:b"),
    "numbers as names": ("train/10/1 train/9/2 val/3", "val 3:9", "train 10/1:10 9/2:9; val 3:9"),
    "no other labels": ("train/1 val/2", "val 2:b", "train 1; val 2:b"),
    "no splits": ("1 2", "val 2:b", "val 2:b"),
    "two tables": ("1 2", "train 1:x; val 2:x", "train 1:x; val 2:x"),
    "the folder of the split": (
        "train/1 train/2 val/1 test/1",
        "train 1:x 2:y; val val/1:y",
        "train 1:x 2:y; val 1:y; test 1",
    ),
    "names alone": ("train/a/1 train/a/2 val/a/1", "train 1:x 2:y; val 1:y", "train a/1:x a/2:y; val a/1:y"),
}
CONTRADICTED: dict[str, tuple[str, str, str]] = {
    "both and a test": ("train/a/1 train/b/2 val/3 test/4", "val 3:b", "expected class folders in 'test'"),
    "an unknown class": ("train/a/1 train/b/2 val/3", "val 3:c", "line 2: expected a known class, found 'c'"),
    "a number": ("train/a/1 train/b/2 val/3", "val 3:0", "line 2: expected a known class, found '0'"),
    "numbers alone": ("train/a/1 train/b/2 val/3", "val 3:0", "'0'\n.*'train' has the classes, such as 'a': write"),
    "no label twice": ("train/a/1 train/b/2 val/3", "val 3: 3:", r"already, found '3\.\w+'$"),
    "measures": ("train/a/1 train/b/2 val/3", "val 3:0.5", "expected names of classes, as 'train' has"),
    "an unknown folder": ("train/1 train/2 val/a/4 val/c/3", "train 1:a 2:b", "'val/c/3.*: expected one of the cl"),
    "an image in two tables": ("1 2", "train 1:x; val 2:x 1:x", "line 3: .*not in line 2 of train.csv already"),
    "an image of another split": ("train/1 test/1", "train 1:x test/1:y", "line 3: .* no split without a table"),
}


@pytest.mark.parametrize("name", [*TOLD, *CONTRADICTED])
@pytest.mark.parametrize("suffix", [".jpg", ".npy"])
def test_a_table_of_one_split_leaves_the_labels_of_others_as_they_are(name: str, suffix: str, tmp_path: Path) -> None:
    files, given, expected = {**TOLD, **CONTRADICTED}[name]
    content = b"x" if suffix == ".jpg" else npy_bytes(np.zeros(3))
    put(tmp_path / "src", *(f"{file}{suffix}" for file in files.split()), content=content)
    texts = dict(one.split(" ", 1) for one in given.replace(":", f"{suffix},").split("; "))
    texts = {split: "\n".join(["path,label", *lines.split()]) for split, lines in texts.items()}
    options = ConvertOptions(table=tables(tmp_path, texts))
    if name in CONTRADICTED:
        with pytest.raises(SourceError, match=f"(?s){expected}"):
            collect(tmp_path / "src", options)
        return
    found = collect(tmp_path / "src", options)
    meant = []
    for split in found.splits:
        paths = ((os.path.splitext(os.fsdecode(key).removeprefix(f"{split}/"))[0], n) for key, n in rows(found, split))
        meant.append(" ".join([split, *(path if n is None else f"{path}:{found.classes[n]}" for path, n in paths)]))
    assert "; ".join(meant) == expected
    assert found.classes == tuple(sorted(set(re.findall(":([^ ;]+)", expected))))


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
    assert splits("dev/imagenet/train/a", "dev/imagenet/val/a") == ["train", "val"]
    assert splits("train/bus", "val/train", "val/bus") == ["train", "val"]  # a class of trains
    assert splits("bus/train", "bus/test", "train/train", "train/test") == ["train", "test"]
    assert splits("val/train", "val/bus") == ["val"]
    for some in (["train/test", "bus/test"], ["dev/train/a", "dev/train/b"], ["train/test", "test/train"]):
        with pytest.raises(DoubtError, match=r"list\.txt.*several in '(train|dev)/t"):
            splits(*some)
    with pytest.raises(DoubtError, match=r"list\.txt.*'more/2\.jpg'"):
        splits("train", "test", "more")


def test_a_guessed_column_and_folders_that_name_other_splits_are_a_doubt(tmp_path: Path) -> None:
    put(tmp_path / "src", "train/1.jpg", "train/2.jpg", "val/3.jpg")
    text = "path,label,split\ntrain/1.jpg,x,train\ntrain/2.jpg,x,{}\nval/3.jpg,x,val\n"
    for find in (described, lambda folder, src, text, **options: listed(folder, text, "l.csv", root=src, **options)):
        with pytest.raises(DoubtError, match=r"line 3: .*'train/2\.jpg' says 'train', found 'val'") as caught:
            find(tmp_path, tmp_path / "src", text.format("val"))
        words = [command[-2:] for command in caught.value.commands]
        assert words == [("--split-column", "split"), ("--split-column", "none")]
        found = find(tmp_path, tmp_path / "src", text.format("val"), split_column="split")
        assert len(rows(found, "val")) == 2
        assert list(find(tmp_path, tmp_path / "src", text.format("test")).splits) == ["train", "val", "test"]


NO_TABLES = {"Excel": b"PK\3\4\0xl", "gzip": gzip.compress(b"path,label\n", mtime=0), "binary": b"\xd0\xcf\0"}


@pytest.mark.parametrize("kind", NO_TABLES)
def test_a_table_of_another_kind_is_named(kind: str, folder: Path) -> None:
    (folder / "t").write_bytes(NO_TABLES[kind])
    with pytest.raises(SourceError, match=rf"/t: .*{kind}.*CSV"):
        collect(folder, ConvertOptions(table=folder / "t"))


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
    "names alone": (["a/1.jpg", "b/c/2.png"], ["1.jpg", "2"], ["a/1.jpg", "b/c/2.png"], "2 rows, pictures"),
    "names of another case": (["a/1.jpg", "b/2.jpg"], ["1.JPG", "2.jpg"], ["a/1.jpg", "b/2.jpg"], "1 row, letter case"),
    "exact is best": (["1.jpg", "1.JPG", "a/1.jpg"], ["1.jpg"], ["1.jpg"], ""),
    "one is there": (["1.jpg", "a/2.jpg"], ["1.jpg", "2.jpg"], ["1.jpg", "2.jpg"], ""),
    "another suffix": (["a/1.png", "2.jpg"], ["a/1.jpg", "2.jpg"], ["a/1.jpg", "2.jpg"], ""),
    "no suffix": (["1.jpg", "1.txt", "2.PNG"], ["1", "2", "gone"], ["1.jpg", "2.PNG", "gone"], ""),
    "another folder": (["a/1.jpg", "2.jpg"], ["b/1.jpg", "2.jpg"], ["b/1.jpg", "2.jpg"], ""),
    # None is chosen out of two.
    "two cases": (["a/1.Jpg", "a/1.JPG"], ["a/1.jpg"], [], ""),
    "two forms": ([NFC, NFD], [NFC.lower()], [], ""),
    "two folders": (["a/1.jpg", "b/1.jpg"], ["1.jpg"], [], ""),
    "two folders and suffixes": (["a/1.jpg", "b/1.png"], ["1"], [], ""),
    "two suffixes": (["1.jpg", "1.png"], ["1"], [], ""),
    "two suffixes and a backslash": (["a/1.jpg", "a/1.png"], ["a\\1"], [], ""),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("is_src", [True, False])
def test_a_path_may_be_written_in_another_way_and_a_note_says_so(name: str, is_src: bool, tmp_path: Path) -> None:
    pictures, paths, meant, word = WAYS[name]
    put(tmp_path / "src", *pictures)
    text = json.dumps([{"path": path, "label": str(n)} for n, path in enumerate(paths)])
    with contextlib.nullcontext() if meant else pytest.raises(SourceError) as caught:
        if is_src:
            found = listed(tmp_path, text, "table.csv", root=tmp_path / "src")
        else:
            found = described(tmp_path, tmp_path / "src", text)
    if caught is not None:
        assert re.search(r"(?s)table\.csv.*item 0: expected the path of one image", str(caught.value))
        return
    assert rows(found) == [(os.fsencode(path), n) for n, path in enumerate(meant)]
    said = [note for note in found.notes if note.startswith("table.csv: in ")]
    assert bool(said) == bool(word)
    assert any(f"table.csv: in {word}" in note for note in said) or not word
    for source in found.splits["train"]:
        if os.fsdecode(source.key) in pictures:
            assert found.origin.read(source) == b"x"


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
    put(tmp_path / "a=b", "1.jpg")  # which may be the name of a folder
    assert rows(listed(tmp_path, "path,label\n1.jpg,0\n", "t.csv", root=tmp_path / "a=b")) == [(b"1.jpg", 0)]


def test_every_fault_is_named_with_its_line_at_once_and_of_very_many_the_first(folder: Path) -> None:
    message = refused(folder, "a/1.jpg 0\na/2.jpg\na/1.jpg 1\nb/3.jpg x\n\nc/4.jpg -1\n./a/1.jpg 0\nmy dog.jpg 2\n")
    assert message.splitlines() == [
        f"{folder / 'list.txt'}: 5 lines are wrong:",
        "  line 2: expected `PATH LABEL`, or columns named in the first line, found 'a/2.jpg'",
        "  line 3: expected a path that is not in line 1 already, found 'a/1.jpg'",
        "  line 4: expected an integer, as other labels are, found 'x'",
        "  line 6: expected a class name, or an integer from 0 to 1,048,575, found '-1'",
        "  line 7: expected a path that is not in line 1 already, found './a/1.jpg'",
    ]
    lines = refused(folder, "a/1.jpg 0\n" + "nothing\n" * 50_000).splitlines()
    wrong = [*(f"  line {number}" for number in range(2, 12)), "  and 49,990 more"]
    assert [line.partition(":")[0] for line in lines[1:]] == wrong
