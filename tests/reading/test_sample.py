"""What a person sees of a set at a prompt and in a notebook."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from arrays import change_split, some_arrays
from disks import raising

from shardio.conversion.writing.set_writer import ShardWriter
from shardio.reading.sample import captions_of
from shardio.reading.shardset import ShardSet, open_shards

HOSTILE = "</table><script>alert('x')</script>\" onerror='y'\n\x1b[31m\u202e"


def tags_of(text: str) -> list[tuple[str, list[tuple[str, str | None]]]]:
    tags: list[tuple[str, list[tuple[str, str | None]]]] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append((tag, attrs))  # type: ignore[method-assign]
    parser.feed(text)
    return tags


def test_a_sheet_has_the_samples_that_were_asked_for(make_set: Callable[..., Path]) -> None:
    shards = open_shards(make_set(30, (12, 10, 3)))
    drawn = np.asarray(shards.show([3, 17], side=12))
    for place, index in enumerate([3, 17]):
        left = 6 + place * 16
        np.testing.assert_array_equal(drawn[6:18, left : left + 10], shards[index].image)
    assert shards.show(columns=6, side=12).size == (6 * 16 + 6, 4 * (12 + 28 + 6) + 6)
    with pytest.raises(IndexError):
        shards.show([30])


def test_captions_and_samples_have_the_names_of_classes(make_set: Callable[..., Path]) -> None:
    shards = open_shards(make_set(9))
    assert captions_of(shards, np.array([8, 2])) == ["8: c1\n8.png", "2: c2\n2.png"]
    assert (shards[8].class_name, "label=1 'c1'" in repr(shards[8])) == ("c1", True)
    assert "1 c1" in shards[8]._repr_html_()


def test_html_of_a_hostile_set_is_a_table_and_pictures(tmp_path: Path) -> None:
    out = tmp_path / HOSTILE.replace("/", "")
    with ShardWriter(out, (4, 4, 3), classes=[HOSTILE, "b" * 10_000]) as writer:
        for i in range(9):
            writer.append(np.full((4, 4, 3), i, np.uint8), 0, key=os.fsencode(HOSTILE))
    shards = open_shards(out)
    text = shards._repr_html_()
    tags = [tag for tag, _ in tags_of(text)]
    assert set(tags) == {"table", "tr", "th", "td", "div", "img"}
    assert tags.count("img") == 6
    assert {name for _, attributes in tags_of(text) for name, _ in attributes} <= {"style", "src", "alt", "title"}
    assert text.isprintable()
    assert len(re.sub(r"base64,[^']*", "", text)) < 10_000
    assert [tag for tag, _ in tags_of(shards[0]._repr_html_())].count("img") == 1


def test_html_names_what_the_set_has(make_set: Callable[..., Path]) -> None:
    out = make_set(20)
    change_split(out, some_arrays(20, 6, 5))
    shards = open_shards(out)
    assert "clip" in shards._repr_html_()
    assert f" with {', '.join(shards.arrays)}, 7 classes" in repr(shards)
    assert "<th style='text-align:left'>mask</th>" in shards[0]._repr_html_()


def test_html_without_pillow_or_with_storage_that_fails_is_the_table(
    make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = open_shards(make_set(3))
    with monkeypatch.context() as patch:
        patch.setattr(ShardSet, "gather", raising(OSError("no such pages")))
        assert shards._repr_html_().endswith("</table>")
    monkeypatch.setitem(sys.modules, "shardio.drawing.sheet", None)
    assert shards._repr_html_().endswith("</table>")


def test_a_notebook_shows_sets_samples_and_sheets(make_set: Callable[..., Path]) -> None:
    formatters = pytest.importorskip("IPython.core.formatters")
    shards = open_shards(make_set(30))
    html = {"text/html", "text/plain"}
    for shown, kinds in ((shards, html), (shards[3], html), (shards.show([1]), {"image/png", "text/plain"})):
        assert formatters.DisplayFormatter().format(shown)[0].keys() >= kinds
