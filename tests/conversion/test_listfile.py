"""Lists of images: what their lines mean, and every fault with its line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from folders import put
from storages import CLASSES, draw_imagenet, rows, write_list

from shardio.conversion.sources.collection import Collection
from shardio.conversion.sources.listfile import scan_list
from shardio.conversion.sources.tree import scan_tree
from shardio.errors import DecodeError, SourceError


def listed(folder: Path, text: str | bytes, name: str = "list.txt") -> Collection:
    path = folder / name
    path.write_bytes(text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text)
    return scan_list(path)


def refused(folder: Path, text: str | bytes, name: str = "list.txt") -> str:
    with pytest.raises(SourceError) as caught:
        listed(folder, text, name)
    message = str(caught.value)
    assert message.startswith(f"{folder / name}: "), message
    return message


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
    ],
)
def test_columns_are_found_by_name(text: str, name: str, folder: Path) -> None:
    found = listed(folder, text, name)
    assert rows(found) == [(b"a/1.jpg", 0), (b"b/3.jpg", 1)]
    assert found.classes == ("x", "y")


def test_quoted_fields_may_hold_commas_quotes_and_line_breaks(folder: Path) -> None:
    put(folder, 'a,"b"\nc.jpg')
    found = listed(folder, 'path,label\n"a,""b""\nc.jpg","x, y"\n', "list.csv")
    assert rows(found) == [(b'a,"b"\nc.jpg', 0)]
    assert found.classes == ("x, y",)


def test_two_words_for_one_split_are_named_with_their_lines(folder: Path) -> None:
    text = "path,label,split\na/1.jpg,x,Val\na/2.jpg,x,val\nb/3.jpg,x,train\nc/4.jpg,x,dev\n"
    assert "line 5: expected the split 'Val', as in line 2, found 'dev'" in refused(folder, text, "list.csv")


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


@pytest.mark.parametrize("name", [b"\xff\xfe.jpg", "été.jpg".encode(), b"a;b.jpg", b"a\\b.jpg", b"#1.jpg", b"~.jpg"])
def test_odd_names_are_kept_byte_for_byte(name: bytes, tmp_path: Path) -> None:
    put(tmp_path, name)
    found = listed(tmp_path, name + b" 0\n")
    assert rows(found) == [(name, 0)]
    assert found.origin.read(found.splits["train"][0]) == b"x"


def test_keys_are_relative_to_the_list_wherever_paths_begin(folder: Path) -> None:
    put(folder, "deep/5.jpg", "elsewhere/6.jpg")
    (folder / "lists").mkdir()
    text = f"./a//1.jpg 0\n{folder}/a/2.jpg 1\na/../b/3.jpg 2\n../{folder.name}/c/4.jpg 3\n"
    found = listed(folder, text)
    assert [key for key, _ in rows(found)] == [b"a/1.jpg", b"a/2.jpg", b"b/3.jpg", b"c/4.jpg"]
    assert [found.origin.read(source) for source in found.splits["train"]] == [b"x"] * 4
    outside = listed(folder / "lists", f"../a/1.jpg 0\n{folder}/a/2.jpg 1\n")
    assert [key for key, _ in rows(outside)] == [b"../a/1.jpg", os.fsencode(folder / "a/2.jpg")]
    assert [outside.origin.read(source) for source in outside.splits["train"]] == [b"x"] * 2


def test_a_list_of_a_tree_gives_its_keys_labels_and_classes(tmp_path: Path) -> None:
    tree = draw_imagenet(tmp_path / "imagenet")
    found, expected = scan_list(write_list(tree, tree / "list.csv")), scan_tree(tree)
    assert found.classes == CLASSES == expected.classes
    for split in ("train", "val"):
        assert sorted(rows(found, split)) == sorted(rows(expected, split))


def test_a_file_that_is_not_there_is_a_source_that_is_refused(folder: Path) -> None:
    found = listed(folder, "a/1.jpg 0\ngone.jpg 1\n")
    with pytest.raises(DecodeError, match=r"^unreadable: No such file or directory$"):
        found.origin.read(found.splits["train"][1])


# --- faults -----------------------------------------------------------------------------------------------------------


def test_every_fault_is_named_with_its_line_at_once(folder: Path) -> None:
    message = refused(folder, "a/1.jpg 0\na/2.jpg\na/1.jpg 1\nb/3.jpg x\n\nc/4.jpg -1\n./a/1.jpg 0\nmy dog.jpg 2\n")
    assert message.splitlines() == [
        f"{folder / 'list.txt'}: correct the list: 5 lines are wrong:",
        "  line 2: expected `PATH LABEL`, or columns named in the first line, found 'a/2.jpg'",
        "  line 3: expected a path that is not in line 1 already, found 'a/1.jpg'",
        "  line 4: expected an integer, as other labels are, found 'x'",
        "  line 6: expected a class name, or an integer from 0 to 1,048,575, found '-1'",
        "  line 7: expected a path that is not in line 1 already, found './a/1.jpg'",
    ]


def test_every_fault_of_a_csv_is_named_with_its_line_at_once(folder: Path) -> None:
    text = (
        'path,label,split\na/1.jpg,x,train\na/2.jpg,x\n,x,train\nb/3.jpg,,train\n"my\ndog.jpg",z,val\nc/4.jpg,x,a/b\n'
    )
    assert refused(folder, text, "list.csv").splitlines()[1:] == [
        "  line 3: expected 3 fields, found 'a/2.jpg,x'",
        "  line 4: expected a path of 1 to 4,096 bytes without NUL, found ''",
        "  line 5: expected a class name, or an integer from 0 to 1,048,575, found ''",
        "  line 7: expected one of the classes of 'train', found 'z'",
        "  line 8: expected a split named with letters, digits, '.', '_' and '-', found 'a/b'",
    ]


def test_the_first_of_very_many_faults_are_shown_and_all_are_counted(folder: Path) -> None:
    message = refused(folder, "a/1.jpg 0\n" + "nothing\n" * 50_000)
    assert message.splitlines()[1].startswith("  line 2: ")
    assert message.splitlines()[10].startswith("  line 11: ")
    assert message.splitlines()[11:] == ["  and 49,990 more"]


@pytest.mark.parametrize(
    ("text", "name", "found"),
    [
        ("", "list.txt", "expected lines of `PATH LABEL`"),
        ("path,label\n", "list.csv", "expected lines of `PATH LABEL`"),
        ("a/1.jpg,0\n", "list.csv", "line 1: expected the names of columns, path and label among them"),
        ("path,name\na/1.jpg,0\n", "list.txt", "line 1: expected the names of columns, path and label among them"),
        ("file,image,label\na,b,c\n", "l.csv", "line 1: expected one column of path, filename"),
        ("path,class,category\na,b,c\n", "l.csv", "found class, category. Rename the right one to 'label'"),
        ("path,path,label\na,b,c\n", "l.csv", "found path, path. Rename"),
        ('path,label\n"a/1.jpg,0\n', "l.csv", "expected a line of CSV"),
        ("path,label\na/1.jpg," + "x" * 200_000 + "\n", "l.csv", "expected fewer than 65,536 characters"),
        ("x" * 100_000 + " 0\n", "l.txt", "line 1: expected fewer than 65,536 characters"),
        ("a\0b.jpg 0\n", "l.txt", "without NUL"),
        ("x" * 5000 + " 0\n", "l.txt", "a path of 1 to 4,096 bytes"),
        ("0\t5.0\ta/1.jpg\n", "l.lst", "the folder of the list"),
        ("images/a/1.jpg 0\nimages/a/2.jpg 0\n", "l.txt", "none at the first 2: 'images/a/1.jpg' is not in /"),
        ("https://host/a/1.jpg 0\n", "l.txt", "The way out: copy the images to files here"),
        (
            "/nowhere/a/1.jpg 0\n",
            "l.txt",
            "none at the first 1: of '/nowhere/a/1.jpg' only '/' exists. The way out: correct",
        ),
        ("b/1.jpg 0\n/usr/nowhere/2.jpg 0\n", "l.txt", "of the list; of '/usr/nowhere/2.jpg' only '/usr' exists"),
    ],
)
def test_what_is_wrong_with_a_whole_list_is_said(text: str, name: str, found: str, folder: Path) -> None:
    assert found in refused(folder, text, name)


def test_a_list_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"expected a readable list, found: No such file or directory"):
        scan_list(tmp_path / "gone.txt")
