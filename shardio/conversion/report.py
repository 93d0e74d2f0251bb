"""The progress of a conversion, its bar, and the report at the end."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.images.decode import FACTS, JUNK
from shardio.conversion.options import Progress
from shardio.conversion.plan import Plan, ShardTask
from shardio.conversion.records import MendedSource, Reject, ShardRecord, read_rejects
from shardio.conversion.sources.collection import Collection as Scanned
from shardio.errors import bytes_text, counted, first_of, printable, shortened
from shardio.format.layout import LABELS_NAME, REJECTS_NAME
from shardio.format.manifest import Manifest
from shardio.sets.index import read_rows
from shardio.sets.storage import FolderStorage
from shardio.system.progress import Bar


@dataclass(frozen=True)
class UnfinishedParts:
    """The state of the set when one part of a conversion ends before other parts have finished."""

    num_shards: int
    """The number of shards of the whole set."""
    num_finished: int
    """The number of finished shards of all parts."""
    parts: tuple[int, ...]
    """The parts that have not finished: the numbers K, for the N of this call's `part=(K, N)`."""
    differing: bool = False
    """Whether these parts have finished, but from files of other sizes or times than SRC has here."""


@dataclass(frozen=True, repr=False)
class ConvertReport:
    """The outcome of a conversion, which `str` describes. Until the set is published, all numbers count this call's
    part only."""

    out: str
    digest: str
    """The digest of the published set; "" if it is not published yet."""
    num_samples: Mapping[str, int]
    """Samples per split."""
    num_shards: int
    nbytes: int
    """Size of the published files."""
    num_sources: int
    refused: Mapping[str, int]
    """Refused sources per reason; rejects.jsonl lists every refused source."""
    source: str
    """The kind of storage of the sources: for images "tree", "ilsvrc", ...; for arrays "arrays" (a tree), "npy" or
    "npz"; for a Python dataset "dataset"."""
    mended: tuple[MendedSource, ...]
    """Sources whose header had to be mended, with the reason."""
    ignored: Mapping[str, int]
    """Entries of SRC that are not converted, per reason."""
    left_out: Mapping[str, Sequence[str]]
    """The keys of the images that tables and options leave out, per reason. `ignored` counts these images, too."""
    seconds: float
    num_converted: int
    """The number of sources that this call converted or refused. Other calls did the rest."""
    warned: tuple[MendedSource, ...] = ()
    """Sources with several pictures, and sources that a library warned about while decoding, with the warning."""
    notes: tuple[str, ...] = ()
    """In words, what the conversion has understood or guessed of SRC, such as classes and the column of the labels."""
    facts: Mapping[str, int] = field(default_factory=dict)
    """Counts of pictures by name: for each name in `decode.FACTS`, those of which it is true; and what
    `Fit.count_enlarged` returns. Empty until the set is published. FACTS are missing if another call published it."""
    unlabeled: tuple[str, ...] = ()
    """The splits whose samples have no labels."""
    published_before: bool = False
    """Whether the set was published before this call, which then had nothing to do."""
    unfinished: UnfinishedParts | None = None
    """The state of the other parts; None if the set is published."""

    def __str__(self) -> str:
        return "\n".join(map(printable, self._lines()))

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        noun = noun_of(self.source)
        if self.num_converted:
            rate = self.num_converted / self.seconds
            yield f"converted {counted(self.num_converted, noun)} in {self.seconds:,.1f} s ({rate:,.0f} {noun}s/s)"
        elif self.unfinished or self.published_before:
            same = "the set is published, from the same names in SRC (contents are not compared)"
            yield f"nothing to do: {'this part is finished' if self.unfinished else same}"
        else:
            yield f"published: other calls converted all {noun}s"
        yield f"  source  {self.source}"
        yield from (f"  found   {note}" for note in self.notes)
        digest = f", digest {self.digest[:16]}" if self.digest else ""
        yield f"  set     {counted(self.num_shards, 'shard')}, {bytes_text(self.nbytes)} in {self.out}{digest}"
        if self.refused:
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in self.refused.items())
            where = f", listed in {os.path.join(self.out, REJECTS_NAME)}" if self.digest else ""
            yield f"  refused {sum(self.refused.values()):,}: {reasons}{where}"
        if self.mended:
            yield f"  mended  {len(self.mended):,}: {JUNK}"
        by_warning: dict[str, list[str]] = {}
        for warned in self.warned:
            by_warning.setdefault(warned.warning, []).append(os.fsdecode(warned.key))
        for warning, keys in list(by_warning.items())[:_MOST_WARNINGS]:
            yield f"  warning {first_of(keys, 1)}: {warning}"
        if rest := list(by_warning.values())[_MOST_WARNINGS:]:
            yield f"  and of {sum(map(len, rest)):,} more images, which `warned` names"


def noun_of(source: str) -> str:
    """Returns "sample" if `source`, a kind of storage, has only arrays; otherwise "image"."""
    return "sample" if source in ("arrays", "npy", "npz") else "image"


# Warnings in the text of a report, each with one image.
_MOST_WARNINGS = 5
# A caller who mends images wants all of them in one list, but should not wait for the end of a wrong folder.
_MOST_REFUSED = 100
_MOST_DONE = 10_000


class TooManyBad(Exception):
    """More sources are refused than the caller accepts."""


class Monitor:
    """Counts the sources that are done, of `total`, and calls `on_progress`. Raises TooManyBad if more than `most_bad`
    sources are refused: once 100 are refused or 10,000 are done, so that a small collection is seen to its end."""

    def __init__(
        self, total: int, most_bad: int, on_progress: Callable[[Progress], None] | None, notes: tuple[str, ...] = ()
    ) -> None:
        self.progress = Progress(0, 0, total, notes=notes)
        self.most_bad = most_bad
        self.refused_by_others = 0
        self._on_progress = on_progress or (lambda progress: None)

    def _tell(self, progress: Progress) -> None:
        self.progress = progress
        self._on_progress(progress)

    def report_wait(self, why: str) -> None:
        self._on_progress(replace(self.progress, waits=why))

    def report_spooled(self, count: int) -> None:
        self._tell(replace(self.progress, spooled=self.progress.spooled + count))

    def report_kept(self, records: Collection[ShardRecord]) -> None:
        """Adds the sources of shards that earlier calls have finished. `records` are the records of these shards."""
        kept = sum(record.num_sources for record in records)
        if kept:
            self.progress = replace(self.progress, kept=kept)
            self.report(kept, sum(len(record.rejects) for record in records))

    def report(self, done: int, refused: int, /) -> None:
        """Adds `done` sources, of which `refused` were refused. Raises TooManyBad if the work has to stop."""
        now = self.progress
        self._tell(replace(now, done=now.done + done, refused=now.refused + refused))
        if self.num_refused >= _MOST_REFUSED or self.progress.done >= _MOST_DONE:
            self.check()

    def count_others(self, records: Iterable[ShardRecord]) -> None:
        self.refused_by_others = sum(len(record.rejects) for record in records)

    @property
    def num_refused(self) -> int:
        return self.progress.refused + self.refused_by_others

    def check(self) -> None:
        if self.num_refused > self.most_bad:
            raise TooManyBad


def report_work(
    plan: Plan, tasks: Sequence[ShardTask], records: Mapping[str, ShardRecord], progress: Progress, seconds: float
) -> ConvertReport:
    """Returns a report of the `tasks` that have a record in `records`, which are by name of the shard. The set counts
    as not published yet: `report_set` adds the rest. `progress` and `seconds` are of this call of `convert`."""
    done = [(task.split, records[task.name]) for task in tasks if task.name in records]
    facts: Counter[str] = Counter()
    for _, record in done if len(done) == len(plan.tasks) else ():
        facts.update(record.facts)
    samples: Counter[str] = Counter()
    for split, record in done:
        samples[split] += len(record.rows)
    files = [record.files for _, record in done if record.files]
    noted = [source for _, record in done for source in record.mended]
    return ConvertReport(
        out=str(plan.out),
        digest="",
        num_samples=dict(samples),
        num_shards=len(files),
        nbytes=sum(entry.nbytes for entries in files for entry in entries),
        num_sources=sum(record.num_sources for _, record in done),
        refused=_count_reasons(reject for _, record in done for reject in record.rejects),
        source=plan.collection.kind,
        mended=tuple(source for source in noted if source.warning.startswith(JUNK)),
        warned=tuple(source for source in noted if not source.warning.startswith(JUNK)),
        ignored=dict(plan.collection.ignored),
        left_out=plan.collection.ignored.left_out,
        seconds=seconds,
        num_converted=progress.done - progress.kept,
        notes=tuple(describe(plan.collection)),
        facts=dict(+facts),
        unlabeled=tuple(split for split in plan.collection.splits if not _is_labeled(plan.collection, split)),
    )


_LABELS_FROM = {
    "tree": "the names of folders",
    "kaggle": "folders and lists",
    "tiny-imagenet": "folders and lists",
    "ilsvrc": "the archives",
    "webdataset": "members .cls and .json",
    "dataset": "the items",
}
"""Where labels come from, by kind of storage, if no note says it."""


def _is_labeled(scanned: Scanned, split: str) -> bool:
    return scanned.splits[split][0].label is not None or LABELS_NAME in [one.name for one in scanned.arrays]


def _plain(name: str) -> str:
    return name.strip().casefold()


def describe(scanned: Scanned, labels: Mapping[str, NDArray[np.int64]] | None = None) -> Iterator[str]:
    """Yields in words what SRC was understood to be: splits, classes, where labels come from, and what is ignored.
    `labels` has the labels of each split, or an array of shape (samples, 0) if they are not integers. By default, they
    are the labels that the scan has found."""
    if labels is None:
        labels = {
            split: np.array([one.label for one in some], np.int64)
            if some[0].indexed is not None and scanned.kind != "dataset"
            else np.empty((len(some), 0), np.int64)
            for split, some in scanned.splits.items()
        }
    yield from scanned.notes
    if classes := scanned.classes:
        names = " to ".join(dict.fromkeys((classes[0], classes[-1])))
        is_noted = scanned.kind not in _LABELS_FROM or any("labels" in note for note in scanned.notes)
        yield f"{counted(len(classes), 'class')}, {names}{'' if is_noted else f', from {_LABELS_FROM[scanned.kind]}'}"
    seen: dict[str, str] = {}
    if similar := [
        f"{other!r}, {name!r}" for name in classes if (other := seen.setdefault(_plain(name), name)) != name
    ]:
        yield f"classes that differ only in letter case or blanks: {first_of(similar, 3)}"
    for split, found in labels.items():
        sizes = "" if _is_labeled(scanned, split) else ", without labels"
        if classes and found.size:
            counts = np.bincount(found, minlength=len(classes))
            least, most = int(counts.argmin()), int(counts.argmax())
            sizes = f", {counts[least]:,} ({classes[least]}) to {counts[most]:,} ({classes[most]}) of a class"
            sizes = sizes if counts[least] < counts[most] else f", {counts[most]:,} of each class"
        yield f"{split}: {counted(len(found), 'image' if scanned.has_pixels else 'sample')}{sizes}"
    if scanned.is_held_out:
        yield from _describe_val(labels, classes)
    for reason, count in scanned.ignored.items():
        is_named = reason in scanned.ignored.left_out
        examples = scanned.ignored.examples[reason]
        some = f"{reason}{':' if count == len(examples) else ', such as'} {', '.join(examples)}"
        yield f"{'left out' if is_named else 'ignored'} {count:,}: {some}{' (--json names all)' if is_named else ''}"


def _describe_val(labels: Mapping[str, NDArray[np.int64]], classes: Sequence[str]) -> Iterator[str]:
    """Yields in words which share of all samples and of each class is in val, and which classes train or val lacks.
    `labels` has the labels of the splits, by name."""
    counts = [np.bincount(labels[name].reshape(-1), minlength=len(classes)).tolist() for name in ("train", "val")]
    found = zip(classes, *counts, strict=True)
    shares = {name: val / (train + val) for name, train, val in found if train + val}
    each = ""
    if shares:
        least, most = (extreme(shares, key=shares.__getitem__) for extreme in (min, max))
        each = f": {shares[least]:.1%} of {least} to {shares[most]:.1%} of {most}"
    yield f"val has {len(labels['val']) / sum(map(len, labels.values())):.1%} of the samples{each}"
    for split, share in (("train", 1), ("val", 0)):
        if lacking := [name for name in shares if shares[name] == share]:
            yield f"{split} has no sample of {counted(len(lacking), 'class')}: {first_of(lacking, 5, repr)}"


def describe_facts(facts: Mapping[str, int], sample: str = "") -> Iterator[str]:
    """Yields a line for each fact that is true of a picture. `facts` are as `ConvertReport.facts`. Each line ends in
    `sample`, such as " (of 9 that were tried)"."""
    for fact, text in FACTS.items():
        if count := facts.get(fact):
            yield f"{counted(count, 'picture')} {text}{sample}"
    if count := facts.get("enlarged"):
        factor = (facts["stored"] / facts["own"]) ** 0.5
        cost = f"they take {bytes_text(facts['stored'])} instead of {bytes_text(facts['own'])}"
        yield f"{counted(count, 'picture')} enlarged, {factor:.1f} times a side: {cost}{sample}"


def report_set(work: ConvertReport, plan: Plan, manifest: Manifest) -> ConvertReport:
    """Returns the report of the published set: `work`, from `report_work`, with the numbers of the whole set."""
    facts, labels, scanned = Counter(work.facts), {}, replace(plan.collection, classes=manifest.classes)
    for name, split in manifest.splits.items():
        rows = read_rows(FolderStorage(plan.out), split.index)
        labels[name] = rows["label"] if split.index.has_label else np.empty((len(rows), 0), np.int64)
        if (fit := plan.tasks[0].fit) is not None:
            facts.update(fit.count_enlarged(rows["source_height"], rows["source_width"]))
    return replace(
        work,
        notes=(*describe(scanned, labels), *describe_facts(facts)),
        facts=dict(+facts),
        digest=manifest.digest,
        num_samples={name: split.num_samples for name, split in manifest.splits.items()},
        num_shards=sum(
            max(len(split.shards), *(len(array.shards) for array in split.arrays.values()), 0)
            for split in manifest.splits.values()
        ),
        nbytes=manifest.nbytes,
        num_sources=plan.collection.num_sources,
        refused=_count_reasons(read_rejects(plan.out, manifest.rejects)),
    )


def _count_reasons(rejects: Iterable[Reject]) -> dict[str, int]:
    return dict(Counter(reject.reason for reject in rejects).most_common())


Tell = Callable[[Progress], None]


def show_progress(bar: Bar, progress: Progress) -> None:
    """Shows the progress in a bar. The bar's rate leaves out the sources in shards that earlier calls finished."""
    if progress.waits:
        bar.set_description_str("waiting", refresh=False)
        bar.write(f"shardio: {printable(progress.waits)}", file=sys.stderr)
        return
    bar.begun()
    if bar.total is None:
        bar.reset(progress.total)
        for note in progress.notes:
            bar.write(f"shardio: {printable(note)}", file=sys.stderr)
        if progress.kept:
            line = f"shardio: resuming: {progress.kept:,} of {progress.total:,} samples were kept"
            bar.write(line, file=sys.stderr)
            # Rate and remaining time count the images that this call converts itself.
            bar.n = bar.initial = bar.last_print_n = progress.kept
    spooling = progress.spooled and not progress.done
    bar.set_description(f"copying out of SRC: {progress.spooled:,}" if spooling else None, refresh=False)
    bar.set_postfix(refused=progress.refused, refresh=False)
    bar.update(progress.done - bar.n)


@contextlib.contextmanager
def bar_of(src: object, on_progress: Tell | None) -> Iterator[Tell]:
    """Yields a function that passes a Progress to `on_progress`, if given, and shows it in a bar. Until its first call,
    the bar says that `src` is being scanned."""

    def tell(progress: Progress) -> None:
        if on_progress is not None:
            on_progress(progress)
        show_progress(bar, progress)

    what = shortened(os.fspath(src), 30) if isinstance(src, (str, os.PathLike)) else "the dataset"
    with Bar(unit=" samples", smoothing=0.1) as bar, bar.before_it_begins(f"scanning {what}"):
        yield tell
