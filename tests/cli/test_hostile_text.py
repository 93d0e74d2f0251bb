"""Names, keys, labels, servers and sets may say anything: terminals and logs show it as text in shardio's lines."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from command import run_forked, shardio
from folders import flip
from pictures import random_picture, write_jpeg

from shardio.cache.cached_split import CachedSplit
from shardio.cache.folder import Cache
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.errors import CacheError, DecodeError, FormatError, ShardioError, SourceError, SpaceError, printable
from shardio.format.manifest_file import load_manifest
from shardio.loading.loader import ShardLoader
from shardio.sets.verify import verify

FAKE = "shardio: fake line"
EVIL = f"x\n{FAKE}\r{FAKE}\x1b[31m\x1b]0;t\x07\x9b1m\x85\u202e\u200b\u2028{FAKE}\udc9b\udcff"
"""A new line, a line over this one, colors, a title, the same in C1, another direction, no width, no UTF-8."""


def assert_shows_only_text(*texts: str) -> None:
    for text in texts:
        for line in text.split("\n"):
            assert line.isprintable(), ascii(line)
            assert not line.lstrip().startswith(FAKE), ascii(line)


def assert_clean(result: subprocess.CompletedProcess[str], *, code: int | None = None) -> None:
    assert code is None or result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout or result.stderr
    assert_shows_only_text(result.stdout, result.stderr)


# --- escaping --------------------------------------------------------------------------------------------------------


def test_every_character_is_shown_as_it_is_or_as_visible_characters_that_say_which_it_is() -> None:
    # All planes with characters, and the last number.
    every = "".join(map(chr, [*range(0x32000), *range(0xE0000, 0xE0200), sys.maxunicode]))
    shown = printable(every)
    assert shown.isprintable()
    escape = r"\\(?:[nrt]|x..|u....|U.{8})"
    assert re.sub(escape, lambda found: found[0].encode().decode("unicode_escape"), shown) == every
    assert all(text in shown for text in ("\\x00", "\\u202e", "\\udcff", "\\U000e0001"))
    assert printable(printable(EVIL)) == printable(EVIL)
    for text in ("été", "漢字", "тест", "a b", "C:\\x", "🐈", ""):
        assert printable(text) == text


@pytest.mark.parametrize("kind", [FormatError, SourceError, CacheError, SpaceError, ShardioError])
def test_a_line_of_an_error_stays_one_and_its_arguments_are_as_they_were(kind: type[ShardioError]) -> None:
    error = kind(f"{EVIL}: expected")
    assert str(error) == printable(EVIL) + ": expected"
    assert error.args == (f"{EVIL}: expected",)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_the_lines_of_an_error_are_told_apart() -> None:
    assert str(SourceError("a", "b\nc")) == "a\n  b\\nc"
    assert str(DecodeError("damaged", "a\nb")) == "damaged: a\\nb"
    assert DecodeError("damaged", "a\nb").detail == "a\nb"


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.fixture
def evil_set(tmp_path: Path) -> Path:
    """A set that is hostile in its name, its keys, its classes, what these are called, and its provenance."""
    out = tmp_path / EVIL
    with ShardWriter(out, (4, 4, 3), classes=[EVIL, "b"], class_names=[EVIL + "1", EVIL + "2"]) as writer:
        for i in range(4):
            writer.append(np.full((4, 4, 3), i, np.uint8), i % 2, key=os.fsencode(f"{EVIL}{i}"))
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["provenance"] |= {EVIL: EVIL, "list": [EVIL], "inner": {EVIL: {EVIL: EVIL}}}
    (out / "manifest.json").write_text(json.dumps(manifest))
    return out


def test_commands_show_a_hostile_set_as_text(evil_set: Path, tmp_path: Path) -> None:
    cache, digest = tmp_path / "in" / EVIL, load_manifest(evil_set).digest
    assert json.loads(shardio("info", evil_set, "--json").stdout)["provenance"][EVIL] == EVIL
    (tmp_path / "root").mkdir()
    staged = shardio("stage", evil_set, cache)
    assert (staged.stdout, staged.stderr) == (f"{cache / digest}\n", "")  # as it is, for scripts
    (cache / f"{digest}.fill").write_text(json.dumps({"source": EVIL}))
    with Cache(cache).lease(digest):
        assert_clean(shardio("evict", cache, "--keep", "0"), code=0)
    for code, *words in (
        (0, "info", evil_set),
        (0, "verify", evil_set),
        (0, "list", tmp_path),
        (0, "list", tmp_path, evil_set, "--cache", cache),
        (0, "evict", cache, "--keep", "1TB"),
        (0, "publish", evil_set, tmp_path / "root" / "sound"),
        (1, "publish", evil_set, tmp_path / "root" / EVIL),
        (1, "repair", evil_set, tmp_path / EVIL),
        (0, "evict", cache, "--keep", "0"),
    ):
        assert_clean(shardio(*words), code=code)


def test_commands_name_what_is_damaged_in_a_hostile_set_or_cache_as_text(evil_set: Path, tmp_path: Path) -> None:
    cache, digest = tmp_path / "in" / EVIL, load_manifest(evil_set).digest
    assert shardio("stage", evil_set, cache).returncode == 0
    (cache / f"{digest}.lock").unlink()
    os.mkfifo(cache / f"{digest}.lock")
    assert_clean(shardio("list", tmp_path, "--cache", cache), code=0)
    assert_clean(shardio("evict", cache, "--keep", "0"), code=0)
    assert_clean(shardio("stage", evil_set, cache, "--verify"), code=1)
    shutil.rmtree(cache)
    cache.mkdir()
    (cache / EVIL).write_bytes(b"")
    assert_clean(shardio("evict", cache, "--keep", "0"), code=1)
    flip(evil_set / "train-00000.npy", 4096)
    assert_clean(shardio("verify", evil_set), code=1)
    evil_set = evil_set.rename(tmp_path / "set")
    assert_shows_only_text(*(problem.detail for problem in verify(evil_set).problems))
    assert_clean(shardio("stage", evil_set, tmp_path / "copies"), code=1)
    (evil_set / "train-index.npy").unlink()
    assert_clean(shardio("verify", evil_set), code=1)


@pytest.fixture
def evil_tree(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    src = tmp_path / "src" / EVIL
    for split in ("train", "val"):
        for name in (EVIL, "b"):
            for i in range(2):
                write_jpeg(src / split / name / f"{EVIL}{i}.jpg", random_picture(rng, 20, 20))
    (src / "train" / "b" / f"{EVIL}3.jpg").write_bytes(b"")
    return src


def test_conversions_of_hostile_names_show_text(evil_tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / EVIL
    same = ("convert", evil_tree, out, "--size", "8", "--max-bad", "1")
    for code, *words in (
        # How many images it tries in this time, and so what it expects of the bad one, depends on the machine.
        (0, "plan", *same[1:-1], "100%", "--seconds", "0.01"),
        (1, *same[:-1], "0"),
        (1, *same[:4], "9", *same[5:]),
        (0, *same),
        (0, *same),
        (1, "repair", out, tmp_path / "nowhere" / EVIL),
        (1, "convert", evil_tree, out / "inside"),
        (1, "convert", tmp_path / "nowhere" / EVIL, out),
    ):
        assert_clean(shardio(*words), code=code)
    os.truncate(out / "train-00000.npy", 4096)
    assert_clean(shardio("verify", out), code=1)
    next((evil_tree / "train" / "b").iterdir()).unlink()
    assert_clean(shardio("repair", out, evil_tree), code=1)


def test_words_of_the_command_line_are_shown_as_text(tmp_path: Path) -> None:
    for words in (
        [EVIL],
        ["info", "a", EVIL],
        ["info", f"--{EVIL}"],
        ["convert", "a", "b", "--size", EVIL],
        ["convert", "a", "b", "--fit", EVIL],
        ["verify", EVIL, "--digest", EVIL],
        ["info", f"nonsense://{EVIL}/x"],
        ["info", f"https://{EVIL}/x"],
        ["list", EVIL, f"nonsense://{EVIL}"],
        ["bench", EVIL, "--io", EVIL],
        ["publish", EVIL, EVIL],
        ["stage", EVIL, EVIL],
        ["evict", EVIL, "--keep", EVIL],
        ["evict", EVIL, "--keep", "0"],
    ):
        result = shardio(*words, cwd=tmp_path)
        assert result.returncode in (1, 2)
        assert_clean(result)


def test_a_terminal_of_few_characters_shows_the_others_escaped(make_set: Callable[..., Path], tmp_path: Path) -> None:
    make_set(3).rename(tmp_path / "é漢")
    for encoding, shown in (("latin-1", "\udce9\\u6f22"), ("utf-8", "é漢")):
        result = run_forked("shardio", "info", tmp_path / "é漢", env={**os.environ, "PYTHONIOENCODING": encoding})
        assert f"{tmp_path}/{shown}: " in result.stdout


# --- in Python -------------------------------------------------------------------------------------------------------


def test_what_is_said_of_damaged_samples_and_failed_copies_is_text(evil_set: Path, tmp_path: Path) -> None:
    flip(evil_set / "train-00000.npy", 4096)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with (
            ShardLoader(evil_set, batch_size=4, check="sample") as loader,
            pytest.raises(FormatError, match="in two reads") as damaged,
        ):
            list(loader)
        with closing(CachedSplit(evil_set, tmp_path / "cache", "train")) as split:
            split.open()
            for thread in split._staged.threads:
                thread.wait()
    texts = [str(warning.message) for warning in caught]
    assert any("without a copy" in text for text in texts)
    assert_shows_only_text(str(damaged.value), *texts)
