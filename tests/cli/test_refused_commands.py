"""What a command refuses: one clear error that names the file or the option, and an exit code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from command import assert_one_clear_error, shardio

from shardio.loading.loader import ShardLoader

USAGE = [
    ("convert", "Missing argument 'SRC'"),
    ("convert a b --size big", "found 'big'"),
    ("convert a b --shard-size parsecs", "found 'parsecs'"),
    ("convert a b --max-bad 200%", "found '200%'"),
    ("convert a b --part 3/2", "found '3/2'"),
    ("convert a b --fit stretch", "'stretch' is not one of"),
    ("convert a b --workers 0", "0 is not in the range"),
    ("verify a --subset 0", "found '0'"),
    ("verify a --subset 5", "found '5'"),
    ("verify a --subset 5% --quick", "give only one of them"),
    ("explode", "expected a command of shardio, found 'explode'"),
    ("convert {images} {tmp}/new --size 70000", "size must be (height, width)"),
    ("convert {images} {tmp}/new --size 63x64 --pixels yuv420", "needs an even height"),
    ("bench {set} --seconds 600 --batch-size 9999", "fewer than the global batch of 9999"),
    ("report {set} -o {tmp}/no/page.html", "{tmp}/no does not exist"),
    ("view {set} --indices 5,61", "from 0 to 60, found 5 to 61"),
    ("view {set} --indices 3,17-5", "found '3,17-5'"),
    ("view {set} --indices a", "found 'a'"),
    ("view {set} --class c33", "did you mean c3"),
    ("view {set}", "write the sheet to a file"),
    ("view {set} --augmented nothing", "nothing"),
    ("view {set} --augmented deit3 --against .", "give one of them"),
    ("replay {set} --batch-size 4 --step 15", "--step must be from 0 to 14"),
    ("replay {set} --batch-size 4 --consumed 62", "62"),
    ("replay {set} --batch-size 4 --step 1 --consumed 4", "give only one of them"),
    ("replay {set} --batch-size 4 --mix other", "SET=SHARE"),
    ("stage {set} {tmp}/new --digest abc", "found 'abc'"),
    ("stage a {tmp}/new --rendezvous node:29400", "--together"),
    ("evict a --keep most", "found 'most'"),
    ("evict a", "Missing option '--keep'"),
]
"""Wrong usage, with exit code 2."""
ERRORS = [
    ("replay {set} --batch-size 4 --rank 2", "a rank from 0"),
    ("info {tmp}", "{tmp}/manifest.json"),
    ("verify {tmp}", "{tmp}/manifest.json"),
    ("bench {tmp}", "{tmp}/manifest.json"),
    ("report {tmp}", "holds no shard set"),
    ("replay {set} --batch-size 4 --state /nowhere.json", "/nowhere.json"),
    ("stage {tmp}/no {tmp}/new", "does not exist"),
    ("stage {set} {set}", "choose another folder"),
    ("evict {set} --keep 1GB", "choose another folder"),
    ("evict {tmp}/new --keep 1GB", "{tmp}/new"),
]
"""Errors of files, with exit code 1."""


@pytest.mark.parametrize(("words", "part", "code"), [(*row, 2) for row in USAGE] + [(*row, 1) for row in ERRORS])
def test_what_is_refused_is_one_clear_error(
    words: str, part: str, code: int, image_tree: Path, make_set: Callable[..., Path], tmp_path: Path
) -> None:
    places = {"images": image_tree, "tmp": tmp_path, "set": make_set(61, (12, 10, 3)) if "{set}" in words else ""}
    result = shardio(*(word.format(**places) for word in words.split()))
    assert_one_clear_error(result, code, part.format(**places))
    assert not {"no", "new"}.intersection(os.listdir(tmp_path))


def test_a_file_without_a_state_is_refused(make_set: Callable[..., Path], tmp_path: Path) -> None:
    out = make_set(8)
    (tmp_path / "state.json").write_text('{"epoch": 3}')
    (tmp_path / "state.pt").write_bytes(b"no checkpoint")
    os.mkfifo(tmp_path / "fifo.pt")
    with ShardLoader(out, 4, device="cpu") as loader:
        (tmp_path / "seed.json").write_text(json.dumps({**loader.state_dict(), "seed": "x" * 10**6}))
    for name, part in {"state.json": "no state", "state.pt": "torch", "fifo.pt": "FIFO", "seed.json": "seed"}.items():
        assert_one_clear_error(shardio("replay", out, "--batch-size", "4", "--state", tmp_path / name), 2, name, part)
