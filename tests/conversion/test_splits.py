"""Which words mean which split."""

from __future__ import annotations

from shardio.conversion.sources.splits import in_split_order, known_split, split_name, two_words


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


def test_splits_are_in_the_order_train_val_test_and_then_of_their_names() -> None:
    assert in_split_order(["fold", "test", "a", "val", "train", "val"]) == ["train", "val", "test", "a", "fold"]


def test_two_words_for_one_split_are_found_and_repeated_words_are_one() -> None:
    assert two_words(["train", "val", "train", "fold", "Fold"]) is None
    assert two_words(["train", "val", "dev", "valid"]) == ("val", "dev")
    assert two_words(["Train", "train"]) == ("Train", "train")
