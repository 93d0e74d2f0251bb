"""Sources with the same bytes are found and told, whatever the conversion went through, and converted as all others."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import assert_one_clear_error, shardio
from pictures import random_picture, write_jpeg

from shardio.conversion.convert import convert
from shardio.conversion.duplicates import HASH_NBYTES, UNREAD, Duplicates, find_duplicates, hash_source, hash_sources
from shardio.conversion.report import ConvertReport, Progress
from shardio.conversion.sources.collection import FileOrigin, Source
from shardio.sets.verify import verify

OPTIONS: dict[str, Any] = {"size": 16, "shard_size": 4096 + 3 * 16 * 16 * 3, "workers": 1}


def keys(groups: Sequence[Duplicates] | None) -> list[list[str]]:
    assert groups is not None
    return [[os.fsdecode(source.key) for source in group.sources] for group in groups]


# --- groups -----------------------------------------------------------------------------------------------------------


def listing(*contents: bytes, splits: str = "", labels: str = "") -> list[tuple[str, Source]]:
    """Sources named by their number; split and label are those of the letters, "train" and 0 where there are none."""
    names = {"t": "train", "v": "val", "": "train"}
    return [(names[splits[i : i + 1]], Source(b"%03d" % i, int(labels[i : i + 1] or 0))) for i in range(len(contents))]


def groups_of(*contents: bytes, splits: str = "", labels: str = "") -> tuple[Duplicates, ...]:
    sources = listing(*contents, splits=splits, labels=labels)
    return find_duplicates(sources, b"".join(map(hash_source, contents)), set())


def test_equal_sources_are_grouped_and_single_ones_are_not_named() -> None:
    groups = groups_of(b"a", b"b", b"a", b"c", b"b", b"a", b"")
    assert keys(groups) == [["000", "002", "005"], ["001", "004"]]
    assert groups_of() == groups_of(b"a") == groups_of(b"a", b"b") == ()


def test_equal_sources_under_different_labels_come_first_and_then_those_in_different_splits() -> None:
    contents = (b"same", b"same", b"split", b"split", b"label", b"label", b"both", b"both")
    groups = groups_of(*contents, splits="tttvtttv", labels="00000101")
    assert keys(groups) == [["006", "007"], ["004", "005"], ["002", "003"], ["000", "001"]]
    assert [group.labels_differ for group in groups] == [True, True, False, False]
    assert [group.splits_differ for group in groups] == [True, False, True, False]


@pytest.mark.parametrize("seed", range(5))
def test_groups_are_those_of_a_dictionary_whatever_the_order_of_the_sources(seed: int) -> None:
    rng = np.random.default_rng(seed)
    contents = [b"%d" % rng.integers(60) for _ in range(200)]
    sources = listing(*contents)
    order = rng.permutation(200)
    found = find_duplicates(
        [sources[i] for i in order], b"".join(hash_source(contents[i]) for i in order), {("train", b"007")}
    )
    expected: dict[bytes, list[str]] = {}
    for (_, source), content in zip(sources, contents, strict=True):
        if source.key != b"007":
            expected.setdefault(content, []).append(source.key.decode())
    assert keys(found) == sorted(names for names in expected.values() if len(names) > 1)


def test_sources_that_could_not_be_read_are_not_equal() -> None:
    sources = listing(b"", b"", b"")
    assert find_duplicates(sources, UNREAD * 3, set()) == ()
    assert HASH_NBYTES == len(UNREAD) == len(hash_source(b""))


def test_hashes_are_of_the_bytes_and_missing_files_have_none(tmp_path: Path) -> None:
    contents = [b"one", b"two", b"", b"one"]
    for number, content in enumerate(contents):
        (tmp_path / f"{number:03d}").write_bytes(content)
    sources = [source for _, source in listing(*contents, b"missing")]
    hashes = hash_sources(FileOrigin(tmp_path), sources, threads=3)
    expected = [hashlib.blake2b(content, digest_size=16).digest() for content in contents]
    assert hashes == b"".join([*expected, UNREAD])


def test_a_group_is_one_line_of_ascii_json() -> None:
    sources = [("train", Source(b"a/\xff\n.jpg", 0)), ("val", Source("b/é.jpg".encode(), 1))]
    (group,) = find_duplicates(sources, hash_source(b"x") * 2, set())
    line = group.to_line().decode("ascii")
    assert line.endswith("}\n")
    assert len(line.splitlines()) == 1
    document = json.loads(line)
    assert (document["labels_differ"], document["splits_differ"]) == (True, True)
    assert [os.fsencode(one["key"]) for one in document["sources"]] == [source.key for _, source in sources]
    assert [(one["split"], one["label"]) for one in document["sources"]] == [("train", 0), ("val", 1)]


# --- conversions ------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(image_tree: Path) -> Path:
    """With an image under two labels, one in train and val, one twice in a class, and equal ones that are refused."""

    def copy(name: str, *others: str) -> None:
        for other in others:
            shutil.copyfile(image_tree / name, image_tree / other)

    copy("train/n01/n01_0.JPEG", "train/n02/again.JPEG")
    copy("train/n02/n02_0.JPEG", "val/n02/again.JPEG")
    copy("train/n03/n03_0.JPEG", "train/n03/again.JPEG", "train/n03/and-again.JPEG")
    for name in ("train/n01/empty1.JPEG", "train/n02/empty2.JPEG"):
        (image_tree / name).write_bytes(b"")
    for name in ("train/n01/text1.JPEG", "val/n02/text2.JPEG"):
        (image_tree / name).write_bytes(b"<html>404</html>")
    return image_tree


EXPECTED = [
    ["train/n01/n01_0.JPEG", "train/n02/again.JPEG"],
    ["train/n02/n02_0.JPEG", "val/n02/again.JPEG"],
    ["train/n03/again.JPEG", "train/n03/and-again.JPEG", "train/n03/n03_0.JPEG"],
]


def report(tree: Path, out: Path, **options: Any) -> ConvertReport:
    return convert(tree, out, **{**OPTIONS, "max_bad": 4, "report_duplicates": True, **options})


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_duplicates_among_the_samples_are_reported_and_converted(tree: Path, tmp_path: Path, workers: int) -> None:
    found = report(tree, tmp_path / "out", workers=workers)
    assert keys(found.duplicates) == EXPECTED
    assert dict(found.num_samples) == {"train": 15, "val": 7}
    plain = report(tree, tmp_path / "plain", report_duplicates=False)
    assert plain.duplicates is None
    assert plain.digest == found.digest
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "plain").iterdir()}


def test_a_tree_without_duplicates_has_none(image_tree: Path, tmp_path: Path) -> None:
    assert report(image_tree, tmp_path / "out").duplicates == ()


@pytest.mark.parametrize("first_asks", [False, True])
@pytest.mark.parametrize("after", [4, 10, 26])
def test_duplicates_are_found_across_an_interrupt_whichever_call_has_asked_for_them(
    tree: Path, tmp_path: Path, after: int, first_asks: bool
) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.done >= after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        report(tree, tmp_path / "out", report_duplicates=first_asks, on_progress=interrupt)
    found = report(tree, tmp_path / "out")
    assert found.num_converted < found.num_sources
    assert keys(found.duplicates) == EXPECTED


def test_hashes_of_finished_shards_are_in_their_records_and_sources_are_not_read_again(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.done == 26:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        report(tree, tmp_path / "out", on_progress=interrupt)
    monkeypatch.setattr("shardio.conversion.convert.hash_sources", None)
    assert keys(report(tree, tmp_path / "out").duplicates) == EXPECTED


def test_duplicates_of_a_finished_set_are_found_without_converting_again(tree: Path, tmp_path: Path) -> None:
    report(tree, tmp_path / "out", report_duplicates=False)
    again = report(tree, tmp_path / "out")
    assert again.num_converted == 0
    assert keys(again.duplicates) == EXPECTED


def test_one_file_under_two_names_is_a_duplicate_of_itself(tmp_path: Path) -> None:
    write_jpeg(tmp_path / "src" / "a" / "1.jpg", random_picture(np.random.default_rng(0), 20, 20))
    (tmp_path / "src" / "b").mkdir()
    (tmp_path / "src" / "b" / "2.jpg").symlink_to("../a/1.jpg")
    os.link(tmp_path / "src" / "a" / "1.jpg", tmp_path / "src" / "a" / "3.jpg")
    assert keys(report(tmp_path / "src", tmp_path / "out").duplicates) == [["a/1.jpg", "a/3.jpg", "b/2.jpg"]]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_lists_duplicates_in_a_file_and_counts_them(tree: Path, tmp_path: Path) -> None:
    words = ("convert", tree, tmp_path / "out", "--size", "16", "--max-bad", "4", "--report-duplicates")
    result = shardio(*words, tmp_path / "same.jsonl")
    assert result.returncode == 0, result.stderr
    expected = "3 images found more than once, 1 of them under different labels, 1 in different splits"
    assert f"{expected}, listed in {tmp_path / 'same.jsonl'}" in result.stdout
    lines = (tmp_path / "same.jsonl").read_text("ascii").splitlines()
    assert [[one["key"] for one in json.loads(line)["sources"]] for line in lines] == EXPECTED
    assert verify(tmp_path / "out").ok
    again = shardio(*words, tmp_path / "again.jsonl", "--json")
    assert json.loads(again.stdout)["duplicates"] == [json.loads(line) for line in lines]
    assert (tmp_path / "again.jsonl").read_text("ascii").splitlines() == lines


def test_a_file_that_cannot_be_written_is_told_before_anything_is_converted(tree: Path, tmp_path: Path) -> None:
    words = ("convert", tree, tmp_path / "out", "--size", "16", "--max-bad", "4", "--report-duplicates")
    assert_one_clear_error(shardio(*words, tmp_path / "nowhere" / "file"), 2, "nowhere")
    assert_one_clear_error(shardio(*words, tmp_path), 2, "is a directory")
    assert not (tmp_path / "out").exists()
