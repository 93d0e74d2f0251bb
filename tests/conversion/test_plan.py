"""Plans: order, shards and description follow from options and sources alone."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio.conversion.images.fit import Fit
from shardio.conversion.options import ConvertOptions
from shardio.conversion.plan import Plan, difference, make_plan, order_sources
from shardio.conversion.sources.collection import Collection, FileOrigin, Source
from shardio.conversion.sources.names import Ignored
from shardio.format.layout import HEADER_NBYTES, WORK_FOLDER

ORIGIN, OUT = FileOrigin(Path("/src")), Path("/out")


def sources(count: int, prefix: str = "") -> tuple[Source, ...]:
    return tuple(Source(f"{prefix}n{i % 3}/{i:04d}.jpg".encode(), i % 3) for i in range(count))


def tree(**splits: tuple[Source, ...]) -> Collection:
    return Collection(ORIGIN, ("n0", "n1", "n2"), splits)


def options(side: int = 4, per_shard: int = 10, **changes: Any) -> ConvertOptions:
    given: dict[str, Any] = {"size": side, "shard_size": HEADER_NBYTES + per_shard * side * side * 3}
    return ConvertOptions(**given | changes)


def plan_of(source_tree: Collection, chosen: ConvertOptions | None = None) -> Plan:
    return make_plan(OUT, source_tree, chosen or options())


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_shuffled_order_does_not_depend_on_the_order_of_listing(seed: int) -> None:
    listed = list(sources(200))
    expected = order_sources(listed, options())
    np.random.default_rng(seed).shuffle(listed)
    assert order_sources(listed, options()) == expected


def test_the_seed_changes_the_order() -> None:
    seeds = [0, 1, 2, 1 << 32, (1 << 64) - 1]
    orders = {tuple(order_sources(sources(50), options(seed=seed))) for seed in seeds}
    assert len(orders) == len(seeds)


def test_shuffled_order_is_the_same_for_ever() -> None:
    # These keys were written down once. If they change, conversions begun with an older version end up differently.
    ordered = order_sources(sources(12), options(seed=5))
    assert [int(source.key[-8:-4]) for source in ordered] == [0, 8, 3, 2, 9, 10, 4, 11, 1, 5, 7, 6]


def test_source_order_is_the_order_of_listing() -> None:
    listed = list(sources(40))
    np.random.default_rng(0).shuffle(listed)
    for seed in (0, 1):
        assert order_sources(listed, options(order="source", seed=seed)) == listed


# --- shards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_shard", [1, 3, 10, 50])
def test_shards_cover_all_sources_exactly_once_and_evenly(per_shard: int) -> None:
    for count in range(1, 51):
        chosen = options(per_shard=per_shard)
        tasks = plan_of(tree(train=sources(count)), chosen).tasks
        lengths = [len(task.sources) for task in tasks]
        assert [source for task in tasks for source in task.sources] == order_sources(sources(count), chosen)
        assert max(lengths) - min(lengths) <= 1, count
        assert [task.number for task in tasks] == list(range(-(-count // per_shard))), count


def test_no_shard_is_larger_than_the_shard_size_unless_one_sample_is_and_there_are_no_more_than_needed() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        height, width = (int(n) for n in rng.integers(1, 40, 2))
        shard_nbytes, count = int(rng.integers(1, 60_000)), int(rng.integers(1, 300))
        chosen = ConvertOptions(size=(height, width), shard_size=shard_nbytes)
        tasks, one = plan_of(tree(train=sources(count)), chosen).tasks, height * width * 3
        for task in tasks:
            assert task.nbytes == HEADER_NBYTES + len(task.sources) * one
            assert task.nbytes <= max(shard_nbytes, HEADER_NBYTES + one), (height, width, shard_nbytes, count)
        assert len(tasks) == -(-count // max(1, (shard_nbytes - HEADER_NBYTES) // one))


def test_a_shard_has_at_most_16384_samples_and_by_default_1_gib() -> None:
    for count, shards in ((16_384, [16_384]), (16_385, [8192, 8193])):
        plan = plan_of(tree(train=sources(count)), ConvertOptions(size=4))
        assert [len(task.sources) for task in plan.tasks] == shards
    plan = plan_of(tree(train=sources(5461)), ConvertOptions())
    assert [task.nbytes for task in plan.tasks] == [HEADER_NBYTES + 5461 * 256 * 256 * 3]
    assert len(plan_of(tree(train=sources(5462)), ConvertOptions()).tasks) == 2


def test_every_split_has_its_own_shards_and_key_width() -> None:
    plan = plan_of(tree(train=sources(25, "train/"), val=sources(11, "a-much-longer-folder/")))
    assert [(task.split, task.name, len(task.sources)) for task in plan.tasks] == [
        ("train", "train-00000.npy", 8),
        ("train", "train-00001.npy", 8),
        ("train", "train-00002.npy", 9),
        ("val", "val-00000.npy", 5),
        ("val", "val-00001.npy", 6),
    ]
    for task in plan.tasks:
        longest = max(len(source.key) for source in plan.collection.splits[task.split])
        assert longest <= task.key_nbytes < longest + 8
        assert task.key_nbytes % 8 == 4
        assert task.origin == replace(ORIGIN, spool=OUT / WORK_FOLDER)
        assert (task.out, task.fit) == (OUT, Fit.of(plan.options))
        assert task.wanted is None


def test_the_size_of_a_plan_is_that_of_its_shards_and_indexes() -> None:
    plan = plan_of(tree(train=sources(25, "train/"), val=sources(11, "val/")))
    shards = 5 * HEADER_NBYTES + 36 * 48
    # A row: label 8, key 17 or 15 bytes wide and rounded up to 20, width, height and crc32 4 each.
    assert plan.nbytes == shards + 2 * HEADER_NBYTES + 36 * (8 + 20 + 12)


# --- descriptions -----------------------------------------------------------------------------------------------------

CHANGES: dict[str, ConvertOptions] = {
    "size": options(size=(4, 5)),
    "fit": options(fit="pad"),
    "resample": options(resample="bilinear"),
    "quality": options(quality="fast"),
    "shard_nbytes": options(per_shard=11),
    "order": options(order="source"),
    "seed": options(seed=1),
    "exif_rotate": options(exif_rotate=True),
    "background": options(background=(0, 0, 0)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_option_changes_the_description_and_is_named_as_the_difference(name: str) -> None:
    base = plan_of(tree(train=sources(20))).describe()
    changed = plan_of(tree(train=sources(20)), CHANGES[name]).describe()
    assert {key for key in base if base[key] != changed[key]} == {name}
    assert difference(base, changed) == f"{name} {base[name]!r}, here {changed[name]!r}"


CHANGED_TREES: dict[str, Collection] = {
    "another name": tree(train=(*sources(19), Source(b"n1/other.jpg", 1))),
    "another label": tree(train=(*sources(19), Source(sources(20)[19].key, 2))),
    "another order": tree(train=sources(20)[::-1]),
    "another split": tree(val=sources(20)),
    "a split more": tree(train=sources(19), val=(sources(20)[19],)),
    "another class name": replace(tree(train=sources(20)), classes=("n0", "n1", "m2")),
    "a class more": replace(tree(train=sources(20)), classes=("n0", "n1", "n2", "n3")),
}


def test_a_change_of_the_sources_is_named_with_their_numbers() -> None:
    base, changed = (plan_of(one).describe() for one in (tree(train=sources(20)), CHANGED_TREES["another label"]))
    assert difference(base, changed) == "the list of sources changed"
    base, changed = (plan_of(tree(train=sources(count))).describe() for count in (20, 21))
    assert difference(base, changed) == "number of sources 20, here 21; the list of sources changed"


def test_descriptions_of_all_these_plans_are_distinct() -> None:
    chosen = (options(), *CHANGES.values(), options(size=(5, 4)))
    plans = [plan_of(tree(train=sources(20)), one) for one in chosen]
    plans += [plan_of(changed) for changed in CHANGED_TREES.values()]
    for one, other in itertools.combinations(plans, 2):
        assert difference(one.describe(), other.describe())


def test_what_is_ignored_in_the_tree_does_not_change_the_description() -> None:
    base = tree(train=sources(20))
    ignored = Ignored()
    ignored.add("hidden", ".x", 3)
    assert difference(plan_of(replace(base, ignored=ignored)).describe(), plan_of(base).describe()) == ""


@pytest.mark.parametrize(
    "chosen", [options(), *CHANGES.values(), options(size=(3, 5), fit="squash", resample="bilinear")]
)
def test_options_are_read_back_from_their_description(chosen: ConvertOptions) -> None:
    description = json.loads(json.dumps(plan_of(tree(train=sources(20)), chosen).describe()))
    assert ConvertOptions().as_described(description) == chosen


@pytest.mark.parametrize(
    "change",
    [
        {"size": 4},
        {"size": [4]},
        {"fit": ["crop"]},
        {"shard_nbytes": "many"},
        {"seed": True},
        {"background": None},
    ],
)
def test_a_description_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    description = plan_of(tree(train=sources(3))).describe()
    with pytest.raises(ValueError):
        ConvertOptions().as_described({**description, **change})
    (name,) = change
    with pytest.raises(ValueError, match=f"expected the options of a conversion, found .*KeyError.'{name}'"):
        ConvertOptions().as_described({key: value for key, value in description.items() if key != name})
