"""What names mean: words for splits, labels as people write them, clutter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardio.conversion.sources.names import (
    NO_VECTORS,
    Numbering,
    by_split,
    check_label,
    clutter,
    in_split_order,
    known_split,
    number_labels,
    numbers_up_to,
    split_name,
)
from shardio.errors import SourceError


def test_clutter_is_known_by_a_name_anywhere_in_a_path() -> None:
    assert {clutter(path) for path in ("a/b.jpg", "a/.b/c", "Thumbs.DB", "lost+found/x", "", "icon")} == {
        *("", "hidden", "of the system")
    }
    assert [clutter(path) for path in ("a/.b/thumbs.db", "thumbs.db/.b")] == ["hidden", "of the system"]


def test_known_words_mean_a_split_in_any_case_and_others_are_splits_of_their_own() -> None:
    meant = {
        "train": ["train", "Training", "TRAIN"],
        "val": ["val", "valid", "validation", "Val", "dev"],
        "test": ["test", "Testing"],
    }
    for name, words in meant.items():
        assert {split_name(word) for word in words} == {known_split(word) for word in words} == {name}
    for word in ("Fold-1", "", "trains", "tests", "evaluation", "train "):
        assert split_name(word) == word
        assert known_split(word) == ""
    assert in_split_order(["fold", "test", "a", "val", "train", "val"]) == ["train", "val", "test", "a", "fold"]


def test_two_words_for_one_split_are_refused() -> None:
    assert by_split("SRC", {"Train": 1, "dev": 2, "fold": 3, "Fold": 4}) == {"train": 1, "val": 2, "fold": 3, "Fold": 4}
    for words, named in ((["train", "val", "dev"], "'val' and 'dev'"), (["Train", "train"], "'Train' and 'tr")):
        with pytest.raises(SourceError, match=f"SRC: .*{named}"):
            by_split("SRC", dict.fromkeys(words))


def numbered(texts: dict[str, set[str]]) -> Numbering:
    return number_labels({(split, text) for split, some in texts.items() for text in some})


def test_integers_are_labels_as_they_are_and_classes_go_up_to_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    found = numbered({"train": {"0", "3", "007"}, "val": {"9"}})
    assert found.classes == tuple(map(str, range(10)))
    assert found.labels == {"0": 0, "3": 3, "007": 7, "9": 9}
    assert not found.expected
    monkeypatch.setattr("shardio.conversion.sources.names.MAX_CLASSES", 100)
    assert numbered({"train": {"99"}}).labels == {"99": 99}
    assert numbered({"train": {"100"}}).labels == {}
    assert [numbers_up_to(0, 100), numbers_up_to(-1, 3), numbers_up_to(2, 3)] == [(), (), ("0", "1", "2", "3")]


def test_names_are_numbered_as_class_folders_are_and_later_splits_have_no_others() -> None:
    names = {"b", "a", "B", "10x", "9x", "a b", "é", "\udcff", "1.2.3", "[a, 1]", "0.5 mm"}
    names |= {"1, 2-dichloroethane", "(1)st", "v1,2", "2020-01-01", "x" * 1024}
    found = numbered({"train": names})
    assert found.classes == tuple(sorted(names))
    assert [found.labels[name] for name in found.classes] == list(range(len(names)))
    found = numbered({"train": set(), "val": {"a", "b"}, "test": {"b", "c"}})
    assert found.classes == ("a", "b")
    assert found.expected == {("test", "c"): "one of the classes of 'val'"}


def test_the_rarer_of_integers_and_names_are_wrong() -> None:
    assert numbered({"train": {"1", "2", "l2"}}).expected == {("train", "l2"): "an integer, as other labels are"}
    assert numbered({"train": {"a", "b", "2"}}).expected == {("train", "2"): "a class name, as other labels are"}
    assert numbered({"train": {"a", "b", "2"}}).classes == ("a", "b")
    assert numbered({"train": {"01", "1"}}).expected == {("train", "01"): "1, as other labels write this number"}


@pytest.mark.parametrize(
    ("texts", "hint"),
    [
        (("", " ", "-1", "+3", "1048576", "9" * 30, ".", "..", "a\nb", "a\0b", "x" * 1025), ""),
        (("3.0", "1e5", ".5", "-0.5"), " (without a decimal point: 3 and not 3.0)"),
        (("[0.1, 0.9]", "[ 0. 1. ]", "(1,2)", "0.1;0.9", "1|0", ".1, 9e-1", "[3]"), f" ({NO_VECTORS})"),
    ],
)
def test_what_is_neither_an_integer_nor_a_name_is_wrong(texts: tuple[str, ...], hint: str) -> None:
    for text in texts:
        for others in ({"1", "2"}, {"a", "b"}, set()):
            found = numbered({"train": {text, *others}})
            assert found.expected == {("train", text): f"a class name, or an integer from 0 to 1,048,575{hint}"}
            assert text not in found.labels


def test_every_label_has_a_number_or_is_wrong_and_never_both() -> None:
    rng = np.random.default_rng(0)
    pool = ["0", "1", "25", "007", "a", "b", "c", "-1", "", "3.5", "..", "1048576", "n01"]
    for _ in range(500):
        splits = {name: {str(text) for text in rng.choice(pool, int(rng.integers(0, 8)))} for name in ("train", "val")}
        found = numbered(splits)
        for split, texts in splits.items():
            for text in texts:
                assert (text in found.labels) != ((split, text) in found.expected)
        assert all(0 <= label < len(found.classes) for label in found.labels.values())


def test_an_integer_of_any_type_is_a_label_and_the_error_for_others_tells_the_way_out() -> None:
    for label in (3, np.int8(3), np.array(3), True, torch.tensor(3), torch.tensor([3])):
        assert check_label(label) == int(label)  # type: ignore[call-overload]
        assert type(check_label(label)) is int
    for wrong in (3.0, np.float32(3), torch.tensor(3.0), "3", None, np.array(0.5)):
        with pytest.raises(TypeError, match=r"^label must be an integer, found .* \(\w+\): pass int\(label\)"):
            check_label(wrong)
    for vector in ([0.1, 0.9], (0, 1), np.array([0.1, 0.9]), torch.tensor([0.1, 0.9]), np.array([3]), []):
        with pytest.raises(TypeError, match=rf"of length {len(vector)}: .*labels=\('float32', {len(vector)}\)"):
            check_label(vector)
