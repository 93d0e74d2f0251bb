"""`shardio report`: one page about a set. Facts are found, pictures drawn, and the page put together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardio.reading.shardset import ShardSet
from shardio.viewing.facts import Facts, OnProgress, find_facts
from shardio.viewing.gallery import make_gallery
from shardio.viewing.page.document import listed_classes, make_page
from shardio.viewing.page.sections import MOST_GROUPS, MOST_MEMBERS, Looks, Refused
from shardio.viewing.pictures import read_pictures
from shardio.viewing.repeats import Member
from shardio.viewing.thumbnails import thumbnail


@dataclass(frozen=True)
class Report:
    page: bytes
    """The HTML, which needs nothing else."""
    facts: Facts


def make_report(
    splits: Mapping[str, ShardSet],
    *,
    num_pictures: int,
    refused: Sequence[Refused],
    source_given: bool,
    on_progress: OnProgress | None = None,
) -> Report:
    """Returns the report of a set, all of whose splits `open_splits` has opened. It looks at `num_pictures` for what
    takes pixels.

    `refused` are the images of its rejects.jsonl. Errors are those of `ShardSet.gather`.
    """
    facts = find_facts(splits, num_pictures, on_progress)
    first = next(iter(splits.values()))
    listed = listed_classes(facts.classes)
    gallery = make_gallery(first, first.labels_of(np.arange(len(first))), [one.label for one in listed])
    indices = [shown.index for some in gallery.values() for shown in some]
    keys = dict(zip(indices, _keys(first, indices), strict=True))
    members = [one for group in facts.repeats.groups[:MOST_GROUPS] for one in group.members[:MOST_MEMBERS]]
    members += [group.members[0] for group in facts.repeats.keys[:MOST_GROUPS]]
    name = os.path.basename(first.folder)
    looks = dict(_looks(splits, members))
    return Report(make_page(name, facts, listed, gallery, keys, looks, refused, source_given), facts)


def _keys(shards: ShardSet, indices: Sequence[int]) -> list[str]:
    return [os.fsdecode(bytes(key)) for key in shards.column_of("key", np.array(indices, np.int64))]


def _looks(splits: Mapping[str, ShardSet], members: Iterable[Member]) -> Iterable[tuple[Member, Looks]]:
    wanted = sorted(set(members))
    for name, shards in splits.items():
        some = [member for member in wanted if member.split == name]
        indices = [member.index for member in some]
        pictures = read_pictures(shards, np.array(indices, np.int64))
        for member, key, picture in zip(some, _keys(shards, indices), pictures, strict=True):
            called = shards.class_names
            label = called[member.label] if 0 <= member.label < len(called) else str(member.label)
            yield member, Looks(label, key, thumbnail(picture))
