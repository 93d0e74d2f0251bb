"""Labels as people write them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardio.conversion.sources.labels import NO_VECTORS, check_label, number_labels
from shardio.format.layout import MAX_CLASSES


def test_integers_are_labels_as_they_stand_and_classes_go_up_to_the_largest() -> None:
    found = number_labels({"train": {"0", "3", "007"}, "val": {"9"}})
    assert found.classes == tuple(map(str, range(10)))
    assert found.labels == {"0": 0, "3": 3, "007": 7, "9": 9}
    assert not found.faults


def test_names_are_numbered_as_class_folders_are() -> None:
    names = {"b", "a", "B", "10x", "9x", "a b", "é", "\udcff"}
    found = number_labels({"train": names})
    assert found.classes == tuple(sorted(names))
    assert [found.labels[name] for name in found.classes] == list(range(8))


def test_names_in_later_splits_are_among_those_of_the_first() -> None:
    found = number_labels({"train": set(), "val": {"a", "b"}, "test": {"b", "c"}})
    assert found.classes == ("a", "b")
    assert found.faults == {("test", "c"): "one of the classes of 'val'"}


def test_the_rarer_of_integers_and_names_are_at_fault() -> None:
    assert number_labels({"train": {"1", "2", "l2"}}).faults == {("train", "l2"): "an integer, as other labels are"}
    assert number_labels({"train": {"a", "b", "2"}}).faults == {("train", "2"): "a class name, as other labels are"}
    assert number_labels({"train": {"a", "b", "2"}}).classes == ("a", "b")


def test_labels_may_be_as_large_as_those_of_any_other_kind_of_source() -> None:
    assert number_labels({"train": {"1048575"}}).labels == {"1048575": MAX_CLASSES - 1}


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        *((text, "") for text in ("", " ", "-1", "+3", "1048576", "9" * 30, ".", "..", "a\nb", "a\0b", "x" * 1025)),
        *((text, " (without a decimal point: 3 and not 3.0)") for text in ("3.0", "1e5", ".5", "-0.5")),
        *(
            (text, f" ({NO_VECTORS})")
            for text in ("[0.1, 0.9]", "[ 0. 1. ]", "(1,2)", "0.1;0.9", "1|0", ".1, 9e-1", "[3]")
        ),
    ],
)
def test_what_is_neither_an_integer_nor_a_name_is_at_fault(text: str, hint: str) -> None:
    for others in ({"1", "2"}, {"a", "b"}, set()):
        found = number_labels({"train": {text, *others}})
        assert found.faults == {("train", text): f"a class name, or an integer from 0 to 1,048,575{hint}"}
        assert text not in found.labels


@pytest.mark.parametrize("text", ["1.2.3", "[a, 1]", "1, 2-dichloroethane", "0.5 mm", "(1)st", "v1,2", "2020-01-01"])
def test_a_name_may_have_numbers_in_it(text: str) -> None:
    assert number_labels({"train": {text}}).classes == (text,)


@pytest.mark.parametrize("label", [3, np.int8(3), np.array(3), True, torch.tensor(3), torch.tensor([3])])
def test_an_integer_of_any_type_is_a_label(label: object) -> None:
    assert check_label(label) == int(label)  # type: ignore[call-overload]
    assert type(check_label(label)) is int


def test_a_float_or_a_vector_is_no_label_and_the_way_out_is_told() -> None:
    for label in (3.0, np.float32(3), torch.tensor(3.0), "3", None, np.array(0.5)):
        with pytest.raises(
            TypeError, match=r"^label must be an integer, found .* \(\w+\): give int\(label\) if it is a"
        ):
            check_label(label)
    for label in ([0.1, 0.9], (0, 1), np.array([0.1, 0.9]), torch.tensor([0.1, 0.9]), np.array([3]), []):
        with pytest.raises(TypeError, match=rf"found a \w+ of {len(label)}: a set has one class for each image"):
            check_label(label)


def test_every_label_has_a_number_or_a_fault_and_never_both() -> None:
    rng = np.random.default_rng(0)
    pool = ["0", "1", "25", "007", "a", "b", "c", "-1", "", "3.5", "..", "1048576", "n01"]
    for _ in range(500):
        splits = {name: {str(text) for text in rng.choice(pool, int(rng.integers(0, 8)))} for name in ("train", "val")}
        found = number_labels(splits)
        for split, texts in splits.items():
            for text in texts:
                assert (text in found.labels) != ((split, text) in found.faults)
        assert all(0 <= label < len(found.classes) for label in found.labels.values())
