"""`shardio report`: the page about a set."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import called
from pictures import encode, random_picture, write_jpeg

from shardio import change, convert
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.format.manifest_file import load_manifest

EVIL = (
    "</script><script>alert(1)</script><img src=x onerror=alert(1)><!--\"'&amp;\u202e\u2028\x00\x1b[31m]]>${1}`"
    + "long" * 2500
)


class Page(HTMLParser):
    """A page as a browser's parser takes it: its elements with their attributes, and the text of each kind."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.open: list[str] = []
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        kind = self.open[-1] if self.open else ""
        if kind == "script" and self.elements[-1][1].get("type") == "application/json":
            kind = "json"
        self.texts[kind] = self.texts.get(kind, "") + data

    @property
    def data(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.texts["json"])
        return data

    @property
    def words(self) -> str:
        """All text of the page but styles and scripts, without the seams between elements."""
        return " ".join(text for kind, text in self.texts.items() if kind not in ("style", "script", "json"))


def report_of(out: object, page: Path, *words: object) -> tuple[Page, str]:
    text = called("report", out, "-o", page, *words)
    return Page(page), text


def assert_needs_nothing_else(page: Page) -> None:
    """No address of anything, no handler, and no script or style but the two that the page's policy names."""
    assert not page.open
    for tag, attributes in page.elements:
        assert tag not in ("iframe", "object", "embed", "link", "base", "form"), tag
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name != "style", tag
            if name in ("src", "href"):
                assert value is not None
                assert value.startswith(("data:image/", "#")), value[:80]
    scripts = [attributes.get("type") for tag, attributes in page.elements if tag == "script"]
    assert scripts == ["application/json", None]
    (policy,) = [a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:; ")
    for kind in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(page.texts[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "@import" not in page.texts["style"]
    assert "url(" not in page.texts["style"]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(SRC, OUT): train and val of three classes, with repeats, and two images that are refused."""
    folder = tmp_path_factory.mktemp("report")
    rng = np.random.default_rng(3)
    pictures = {}
    for split, count in (("train", 6), ("val", 2)):
        for name in ("ant", "bee", "cat"):
            for number in range(count):
                path = folder / "src" / split / name / f"{number}.jpg"
                pictures[f"{split}/{name}/{number}"] = random_picture(rng, 48, 64)
                write_jpeg(path, pictures[f"{split}/{name}/{number}"])
    src = folder / "src"
    (src / "train/bee/again.jpg").write_bytes((src / "train/ant/0.jpg").read_bytes())
    (src / "val/cat/again.jpg").write_bytes((src / "train/cat/1.jpg").read_bytes())
    write_jpeg(src / "train/cat/alike.jpg", pictures["train/bee/2"], quality=60)
    whole = encode(random_picture(rng, 64, 64), "JPEG")
    (src / "train/ant/torn.jpg").write_bytes(whole[:-200])
    (src / "train/ant/empty.jpg").write_bytes(b"")
    convert(src, folder / "out", size=32, max_bad=2)
    return src, folder / "out"


def test_the_page_says_what_the_set_is_and_needs_nothing_else(converted: tuple[Path, Path], tmp_path: Path) -> None:
    src, out = converted
    page, text = report_of(out, tmp_path / "page.html")
    assert_needs_nothing_else(page)
    manifest = load_manifest(out)
    assert manifest.digest in page.words
    assert {one[1]: one[3] for one in page.data["classes"]} == {"ant": [6, 2], "bee": [7, 2], "cat": [7, 3]}
    assert page.data["splits"] == ["train", "val"]
    shown = page.data["classes"][0][4]
    assert len(shown) == 6
    assert all(key.startswith("train/ant/") for _, key, _ in shown)
    assert all(picture.startswith("data:image/webp;base64,") for _, _, picture in shown)
    mean = ", ".join(f"{number:.4f}" for number in manifest.provenance["pixels"]["mean"])
    assert f"Normalize(mean=({mean}), std=(" in page.texts["code"]
    assert f"Normalize(mean=({mean}), std=(" in text
    groups = re.findall(r'<li>\n<div>(.*?)</div>\n<div class="members">(.*?)</div>', page.text, re.DOTALL)
    repeats = [
        (re.findall(r">([^<]+)</span>", marks), sorted(re.findall(r"<bdi>([^<]*/[^<]*)</bdi>", members)))
        for marks, members in groups
    ]
    assert repeats == [
        (["equal", "different labels"], ["train/ant/0.jpg", "train/bee/again.jpg"]),
        (["alike", "different labels"], ["train/bee/2.jpg", "train/cat/alike.jpg"]),
        (["equal", "different splits"], ["train/cat/1.jpg", "val/cat/again.jpg"]),
    ]
    again, _ = report_of(out, tmp_path / "again.html", "--source", src)
    refused = [some.text.partition('<ul class="refused">')[2].partition("</ul>")[0] for some in (page, again)]
    assert [(text.count("<li>"), text.count("<img")) for text in refused] == [(2, 0), (2, 1)]
    assert all("train/ant/torn.jpg" in text and "<b><bdi>empty</bdi></b>" in text for text in refused)
    assert page.text == report_of(out, tmp_path / "again.html")[0].text


def test_long_lists_are_cut_and_counted(
    converted: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_MAX_GROUPS", "_MAX_OF_GROUP", "_MAX_FACTS", "MAX_REFUSED"):
        monkeypatch.setattr(f"shardio.viewing.report.{name}", 1)
    page, _ = report_of(converted[1], tmp_path / "page.html")
    for text in ("The first 1 groups:", "and 1 more", "more entries.", "The first 1 of 2:"):
        assert text in page.words


def test_hostile_names_are_text(tmp_path: Path) -> None:
    out = tmp_path / f"x{EVIL[:60].replace('/', '|').replace(chr(0), '')}"
    rng = np.random.default_rng(4)
    arguments: Any = {"classes": [EVIL, "b"], "class_names": [EVIL + "1", EVIL + "2"]}
    same = random_picture(rng, 16, 16)
    with ShardWriter(out, (16, 16, 3), **arguments) as writer:
        for number in range(6):
            key = os.fsencode(f"{EVIL.replace(chr(0), '')[:900]}{number % 5}") + b"\xff"
            writer.append(same if number < 2 else random_picture(rng, 16, 16), number % 2, key=key)
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["provenance"] |= {
        EVIL: EVIL,
        "change": {"operation": EVIL},
        "earlier": [EVIL, {"operation": [EVIL]}],
        "conversions": [{"conversion": {"fit": [EVIL], "size": {}}}, EVIL],
        "pixels": EVIL,
    }
    (out / "manifest.json").write_text(json.dumps(manifest))
    page, text = report_of(out, tmp_path / "page.html")
    assert_needs_nothing_else(page)
    assert len(page.text) < 200_000
    assert "</script>" not in page.texts["json"]
    assert page.data["classes"][0][1].startswith("</script><script>alert(1)")
    shown = page.words + page.texts["json"]
    assert all(c.isprintable() for c in shown.replace("\n", "")), [c for c in shown if not c.isprintable()]
    assert all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 300, 4), (5, 3, 7)])
def test_samples_of_any_shape_have_a_page(
    make_set: Callable[..., Path], tmp_path: Path, shape: tuple[int, ...]
) -> None:
    page, text = report_of(make_set(9, shape), tmp_path / "page.html")
    assert_needs_nothing_else(page)
    assert text.count(",") >= shape[2] - 1


def test_a_set_without_classes_or_keys_has_a_page(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "out", (4, 4, 3)) as writer:
        for number in range(5):
            writer.append(np.full((4, 4, 3), number, np.uint8), -(1 << 60) * number - number, split="odd")
    page, _ = report_of(tmp_path / "out", tmp_path / "page.html")
    assert_needs_nothing_else(page)
    # JavaScript has no such integers.
    assert [one[0] for one in page.data["classes"]] == [*(str(-(1 << 60) * n - n) for n in (4, 3, 2, 1)), 0]


def test_samples_without_a_class_are_in_no_class(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pictures = [random_picture(rng, 32, 32) for _ in range(4)]
    with ShardWriter(tmp_path / "all", (32, 32, 3), classes=["a", "b"]) as writer:
        for split in ("train", "val"):
            for picture in pictures:
                writer.append(picture, 1, split=split)
    change(tmp_path / "all", tmp_path / "out", split="val", arrays={"labels": np.ones((4, 2), np.float32)})
    page, _ = report_of(tmp_path / "out", tmp_path / "page.html")
    assert [one[3] for one in page.data["classes"]] == [[0, 0], [4, 0]]
    assert page.words.count("different splits") == 4
    assert "0 have different labels" in page.words
    with ShardWriter(tmp_path / "vectors", (32, 32, 3), classes=["a", "b"], labels=("float32", 2)) as writer:
        for picture in pictures:
            writer.append(picture, [0, 1])
    page, _ = report_of(tmp_path / "vectors", tmp_path / "page.html")
    ((label, name, _, counts, shown),) = page.data["classes"]
    assert (label, name, counts, len(shown)) == ("", "", [4], 4)
    assert "No sample has a class." in page.words


def test_a_picture_that_comes_hundreds_of_times_is_one_group(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "out", (8, 8, 3), classes=["a", "b"]) as writer:
        for number in range(300):
            writer.append(np.zeros((8, 8, 3), np.uint8), number % 2)
    page, _ = report_of(tmp_path / "out", tmp_path / "page.html")
    assert "1 group" in page.words
    assert "100 more candidates were too many to compare." in page.words
    assert "and 194 more" in page.words


def test_a_page_of_many_classes_has_the_smallest_and_the_largest_and_stops_where_its_room_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio.viewing.report._MAX_ROWS", 4)
    with ShardWriter(tmp_path / "out", (64, 64, 3), classes=[f"c{n}" for n in range(9)]) as writer:
        rng = np.random.default_rng(9)
        for label in range(9):
            for number in range(label + 1):
                writer.append(rng.integers(0, 256, (64, 64, 3), np.uint8), label, key=f"{label}/{number}")
    page, _ = report_of(tmp_path / "out", tmp_path / "page.html")
    assert [(one[1], len(one[4])) for one in page.data["classes"]] == [("c0", 1), ("c1", 2), ("c7", 8), ("c8", 9)]
    assert "The table lists 4 of them: the smallest and the largest." in " ".join(page.words.split())
    monkeypatch.setattr("shardio.viewing.pictures._MAX_THUMBNAILS", 2)
    page, _ = report_of(tmp_path / "out", tmp_path / "page.html")
    assert [len(one[4]) for one in page.data["classes"]] == [1, 0, 0, 1]
    monkeypatch.setattr("shardio.viewing.pictures._MAX_THUMBNAILS", 4000)
    monkeypatch.setattr("shardio.viewing.pictures._GALLERY_NBYTES", 20_000)
    page, _ = report_of(tmp_path / "out", tmp_path / "page.html")
    shown = [picture for one in page.data["classes"] for _, _, picture in one[4]]
    assert 1 < len(shown) < 20
    assert sum(map(len, shown)) < 30_000
