"""The command or the recipe of docs/guide/collections.md for each collection gives what the collection means."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from command import run_forked, shardio
from places import ROOT
from public_collections import Copy, build, number_of

from shardio.format.manifest_file import load_manifest
from shardio.reading.shardset import open_shards

PAGE = (ROOT / "docs" / "guide" / "collections.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| ([^|`]+?) \| (.+) \|$", PAGE, re.MULTILINE))
del ROWS["collection"]
assert len(ROWS) >= 40
MOST_LINES = 10
"""The most lines of a recipe, without empty ones and imports."""


def recipe(name: str) -> str:
    (block,) = re.findall(rf"^### {re.escape(name)}\n\n```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return str(block)


@pytest.mark.parametrize("name", ROWS)
def test_the_command_of_a_collection_gives_what_it_means(name: str, tmp_path: Path) -> None:
    build(name, copy := Copy(tmp_path))
    if (command := ROWS[name]).startswith("`"):
        result = shardio(*shlex.split(command.strip("`").replace("\\|", "|"))[1:], "--size", "32", cwd=tmp_path)
    else:
        assert f"](#{re.sub('[^a-z0-9 -]', '', name.lower()).replace(' ', '-')})" in command
        block = recipe(name)
        lines = [line for line in block.splitlines() if line and not re.match("import|from", line)]
        assert len(lines) <= MOST_LINES
        (tmp_path / "recipe.py").write_text(block, encoding="utf-8")
        result = run_forked("recipe.py", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    found = {}
    for split in load_manifest(tmp_path / "out").splits:
        shards = open_shards(tmp_path / "out", split)
        for sample in map(shards.__getitem__, range(len(shards))):
            number, label = number_of(sample.image), sample.label
            if label is not None:
                label = tuple(label.tolist()) if np.ndim(label) else shards.classes[int(label)]
            assert number not in found
            assert (sample.arrays.get("mask", np.uint8(number)) == number).all()
            found[number] = (split if copy.meaning[number][0] else "", label)
    assert found == copy.meaning
