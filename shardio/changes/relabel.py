"""`relabel`: other labels for some samples, and other classes, in a new set that shares everything but its indexes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from shardio.changes.carry import Carrying, ChangeReport, Room, carry_out, check_target
from shardio.changes.draft import Draft
from shardio.changes.parents import choose_splits, open_parent
from shardio.changes.tables import Labels, hash_of, read_labels, show_key, some_keys
from shardio.errors import ConvertError, SourceError
from shardio.format.layout import MAX_CLASSES
from shardio.format.parse import check_text, first_repeated
from shardio.sets.choice import describe_unknown, find_labels


class Relabelled(NamedTuple):
    draft: Draft
    num_changed: Mapping[str, int]
    """Samples of each split that have another class now."""
    new_classes: tuple[str, ...]


def plan_labels(
    draft: Draft,
    splits: Sequence[str],
    labels: Mapping[bytes, str | int],
    *,
    classes: Sequence[str] | None = None,
    new_classes: bool = False,
    where: str = "labels",
) -> Relabelled:
    """Returns the set in which the samples of these keys have these labels, and all others those they had.

    `classes` are those of the new set, in their order. Raises SourceError, which begins with `where`, if a key is of no
    sample or a label is no class.
    """
    before = draft.classes
    known = _with_new_classes(draft, labels, classes, new_classes)
    numbers: dict[str | int, int] = {}
    for key, label in labels.items():
        if label not in numbers:
            numbers[label] = _number(known, key, label, where)
    by_key = {key: numbers[label] for key, label in labels.items()}
    used, num_changed, made = set[bytes](), dict[str, int](), dict(known.splits)
    for name in splits:
        split = known.splits[name]
        found = split.rows["label"].copy()
        for sample, key in enumerate(split.keys):
            if (number := by_key.get(key)) is not None:
                found[sample] = number
                used.add(key)
        num_changed[name] = int(np.count_nonzero(found != split.rows["label"]))
        made[name] = split.with_labels(found)
    if missing := [key for key in by_key if key not in used]:
        raise SourceError(
            f"{where}: {len(missing):,} of {len(by_key):,} keys are of no sample: {some_keys(missing)}. Keys are those "
            "of the index: paths relative to what was converted"
        )
    result = replace(known, splits=made)
    if classes is not None:
        result = _with_classes(result, classes)
    return Relabelled(result, num_changed, tuple(name for name in result.classes if name not in before))


def _with_new_classes(
    draft: Draft, labels: Mapping[bytes, str | int], classes: Sequence[str] | None, new_classes: bool
) -> Draft:
    """Returns the set with the classes that come behind its own."""
    more: list[str] = []
    if classes is not None:
        check_text(classes, "classes")
        if (repeated := first_repeated(classes)) is not None:
            raise ValueError(f"classes must be distinct, found {repeated!r} twice")
        if not draft.classes:
            raise ConvertError("classes cannot be listed for a set without any: its labels are numbers")
        more = [name for name in classes if name not in set(draft.classes)]
    elif new_classes and draft.classes:
        distinct = sorted({label for label in labels.values() if isinstance(label, str)})
        more = [label for label in distinct if not find_labels(draft, label)]
    if len(draft.classes) + len(more) > MAX_CLASSES:
        raise ConvertError(f"expected at most {MAX_CLASSES:,} classes, found {len(draft.classes) + len(more):,}")
    names = (*draft.class_names, *more) if draft.class_names else ()
    return replace(draft, classes=(*draft.classes, *more), class_names=names)


def _number(draft: Draft, key: bytes, label: str | int, where: str) -> int:
    if not isinstance(label, (str, int)) or isinstance(label, bool):
        raise TypeError(f"{where}: {show_key(key)}: expected a class or a number, found {label!r:.80}")
    found = find_labels(draft, label)
    if len(found) == 1:
        return found[0]
    if found:
        same = ", ".join(draft.classes[number] for number in found)
        raise SourceError(f"{where}: {show_key(key)}: {label!r} is the name of several classes: say which of {same}")
    raise SourceError(
        f"{where}: {show_key(key)}: {describe_unknown(draft, label)} (new classes are taken with `--new-classes`, "
        "from Python `new_classes=True`)"
    )


def _with_classes(draft: Draft, classes: Sequence[str]) -> Draft:
    """Returns the set with just these classes. Raises ConvertError if a sample has another."""
    place = {name: number for number, name in enumerate(classes)}
    numbers = np.array([place.get(name, -1) for name in draft.classes])
    for name, split in draft.splits.items():
        if (lost := split.rows["label"][numbers[split.rows["label"]] < 0]).size:
            raise ConvertError(
                f"split {name!r}: {lost.size:,} samples have classes that are not listed, such as "
                f"{draft.classes[int(lost[0])]!r}: list it, give them other labels, or leave them out by `shardio drop`"
            )
    return draft.with_classes(classes, numbers)


def relabel(
    out: str | os.PathLike[str],
    new: str | os.PathLike[str],
    labels: Labels,
    *,
    split: str | Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    new_classes: bool = False,
    copy: bool = False,
    on_room: Callable[[Room], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ChangeReport:
    """Makes a new set in the folder `new` of the set in `out`, in which some samples have other labels.

    `labels` is a CSV or parquet file with the columns `key` and `label`, or a mapping of keys. A label is the name of a
    class, its name for people, or its number. Samples without a row keep theirs. A name that is no class is an error,
    or with `new_classes` a class behind the others. `classes` lists all classes of the new set in their order instead.
    `split` names the splits in which the keys are looked for, by default all.

    The report's notes have the numbers of samples that have another label, and the new classes. `Carrying` says what
    `copy`, `on_room` and `on_progress` do, and `carry_out` what is raised.
    """
    parent = open_parent(out)
    check_target(new, [parent])
    by_key, where = read_labels(labels)
    splits = choose_splits(parent, split)
    made = plan_labels(parent.draft, splits, by_key, classes=classes, new_classes=new_classes, where=where)
    arguments: dict[str, Any] = {
        "labels_sha256": hash_of([part for key in sorted(by_key) for part in (key, _as_bytes(by_key[key]))]),
        "num_labels": len(by_key),
        "split": splits if split is not None else None,
        "classes": None if classes is None else len(classes),
        "new_classes": new_classes,
    }
    notes = {"num_relabelled": dict(made.num_changed), "new_classes": list(made.new_classes)}
    carrying = Carrying(copy, on_room, on_progress)
    return carry_out(made.draft, new, "relabel", arguments, [parent], carrying, notes)


def _as_bytes(label: str | int) -> bytes:
    return label.encode("utf-8", "surrogateescape") if isinstance(label, str) else b"%d" % label
