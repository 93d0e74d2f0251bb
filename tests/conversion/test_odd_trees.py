"""Whole conversions of trees as they are found: odd names, links, things that are no files, and files that change."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import run_forked
from conversions import rejects
from folders import ODD_NAMES, hashes, put
from pictures import random_jpeg
from storages import scan_tree

from shardio.conversion.convert import convert
from shardio.conversion.options import ConvertOptions, Progress
from shardio.conversion.plan import make_plan
from shardio.reading.shardset import open_shards
from shardio.sets.verify import verify

OPTIONS: dict[str, Any] = {"size": 8, "shard_size": 4096 + 4 * 8 * 8 * 3, "workers": 1}

NAMES = [
    *ODD_NAMES,
    *(b" ", b" a", b"a ", b"a\t", b"a.", b"a..", b"C:", b"#", b"%00", b"&", b"a;b", b"|", b"[x]", b"{x}", b"!"),
    *(b"\x01\x7f", b"x" * 255, b"\xff" * 255, b"a\xcc\x81", "日本語".encode(), b"train-00000.npy", b"manifest.json"),
]


def picture(seed: int) -> bytes:
    return random_jpeg(seed, 12, 15)


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """Classes a, b and c of four images each."""
    for number in range(12):
        put(tmp_path / "src", b"%c/%d.jpg" % (b"abc"[number // 4], number), content=picture(number))
    return tmp_path / "src"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


# --- names ------------------------------------------------------------------------------------------------------------


def test_any_name_of_a_class_an_image_and_a_refused_file_is_kept_byte_for_byte(tmp_path: Path, out: Path) -> None:
    assert len(set(NAMES)) == len(NAMES) > 35
    for number, name in enumerate(NAMES):
        put(tmp_path / "src", name + b"/" + name, content=picture(number))
        put(tmp_path / "src", b"plain/" + name, content=b"\xff\xd8\xff")
    report = convert(tmp_path / "src", out, **OPTIONS, max_bad=len(NAMES))
    assert report.refused == {"damaged": len(NAMES)}
    shards = open_shards(out)
    assert sorted(shards.index["key"].tolist()) == sorted(name + b"/" + name for name in NAMES)
    assert {os.fsencode(line["key"]) for line in rejects(out)} == {b"plain/" + name for name in NAMES}
    classes = sorted(os.fsdecode(name) for name in [*NAMES, b"plain"])
    assert list(shards.classes) == classes
    for row in shards.index:
        assert os.fsencode(classes[row["label"]]) == row["key"].rpartition(b"/")[0]
    assert verify(out).ok
    assert convert(tmp_path / "src", out, **OPTIONS, max_bad=len(NAMES)).num_converted == 0


def test_commands_show_names_that_are_no_utf8_escaped_and_write_them_as_they_are_into_json(tmp_path: Path) -> None:
    root, out = (os.fsdecode(os.fsencode(tmp_path) + name) for name in (b"/im\xffages", b"/o\xfeut"))
    for name in (b"cl\xff/1.jpg", b"cl\xff/2\xfe.jpg", b"dog/3.jpg"):
        put(Path(root), name, content=picture(1))

    def run(*words: str, encoding: str = "utf-8:strict") -> subprocess.CompletedProcess[str]:
        return run_forked("shardio", *words, env={**os.environ, "PYTHONIOENCODING": encoding})

    done = run("convert", root, out, "--size", "8")
    assert done.returncode == 0
    assert done.stderr.startswith("shardio: 2 classes, cl\\udcff to dog, ")
    shown = out.replace("\udcfe", "\\udcfe")
    assert shown in done.stdout
    for encoding in ("utf-8:strict", "utf-8:surrogateescape"):
        assert run("info", out, encoding=encoding).stdout.startswith(shown + ": ")
    assert json.loads(run("info", out, "--json").stdout)["path"] == out


def test_folders_may_be_nested_deeper_than_functions_can_call_each_other(src: Path) -> None:
    put(src, "c" + "/x" * 200 + "/1.jpg", content=picture(0))
    most = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 100)
    try:
        keys = [source.key for source in scan_tree(src).splits["train"]]
    finally:
        sys.setrecursionlimit(most)
    assert b"c" + b"/x" * 200 + b"/1.jpg" in keys
    assert len(keys) == 13


def replace_file(path: Path) -> None:
    put(path.parent, "new", content=picture(99))
    (path.parent / "new").rename(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(os.unlink, "unreadable: No such file"), (lambda path: os.truncate(path, 99), "damaged: "), (replace_file, "")],
)
def test_an_image_that_changes_between_scan_and_reading_is_refused_or_the_new_one(
    src: Path, out: Path, tmp_path: Path, change: Callable[[Path], None], reason: str
) -> None:
    changing = [src / "b" / "5.jpg"]

    def change_first(progress: Progress) -> None:  # when only the first image is read
        while changing:
            change(changing.pop())

    options = {**OPTIONS, "order": "source", "max_bad": 1}
    report = convert(src, out, **options, on_progress=change_first)
    assert verify(out).ok
    if reason:
        (line,) = rejects(out)
        assert f"{line['key']} {line['reason']}: {line['detail']}".startswith(f"b/5.jpg {reason}")
        assert dict(report.num_samples) == {"train": 11}
    else:
        convert(src, tmp_path / "again", **options)
        assert hashes(out) == hashes(tmp_path / "again")


def test_an_image_that_changes_after_its_shard_was_begun_has_the_shard_made_again(
    src: Path, out: Path, tmp_path: Path
) -> None:
    # The first image of the first shard is read already when it changes: the shard's record is of an older state.
    def replace_and_stop(progress: Progress) -> None:
        if progress.done == 1:
            put(src, b"a/0.jpg", content=picture(98) + b"longer")
        if progress.done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(src, out, **OPTIONS, on_progress=replace_and_stop, order="source")
    assert (out / ".convert" / "train-00000.npy.json").exists()
    assert convert(src, out, **OPTIONS, order="source").num_converted == 12
    convert(src, tmp_path / "again", **OPTIONS, order="source")
    assert hashes(out) == hashes(tmp_path / "again")


def test_a_folder_of_very_many_files_costs_a_fixed_amount_of_memory_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million files in one folder then take less than 0.4 GB while they are listed, and 0.2 GB after it."""
    monkeypatch.setattr("shardio.sets.levels.NUM_SAMPLES", 10)
    put(tmp_path, *(f"n01440764/n01440764_{number:08d}.JPEG" for number in range(1_000)))
    make_plan(Path("/out"), scan_tree(tmp_path), ConvertOptions()).describe()  # and imports what it needs
    tracemalloc.start()
    try:
        collection = scan_tree(tmp_path)
        listed, peak = tracemalloc.get_traced_memory()
        plan = make_plan(Path("/out"), collection, ConvertOptions())
        plan.describe()
        planned, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert collection.num_sources == 1_000
    assert peak < 400 * 1_000
    assert listed < planned < 200 * 1_000
