"""`append`: converts new images with the options of a set, and merges both into a new set."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from shardio.changes.carry import Carrying, ChangeReport, Room, check_target
from shardio.changes.merge import MergeOptions, SameImages, SameKeys, carry_out_merge
from shardio.changes.parents import Parent, open_parent
from shardio.conversion.convert import convert
from shardio.conversion.options import DEFAULT_MAX_BAD, ConvertOptions, Src, read_options
from shardio.conversion.report import ConvertReport, Progress
from shardio.conversion.sources.detect import EmptyClasses, SourceKind
from shardio.conversion.sources.table import Table, Tables
from shardio.conversion.sources.tree import Labels
from shardio.errors import ConvertError, ShardioError
from shardio.format.layout import LABELS_NAME
from shardio.sets.history import conversions_of
from shardio.sets.names import looks_like_a_set
from shardio.sets.new_folder import taken, temporary_folder


def append(
    out: str | os.PathLike[str],
    src: Src,
    new: str | os.PathLike[str],
    *,
    source: SourceKind = "auto",
    labels: Labels | None = None,
    empty_classes: EmptyClasses = "refuse",
    table: Tables | None = None,
    workers: int | None = None,
    max_bad: int | float = DEFAULT_MAX_BAD,
    only_common: bool = False,
    same_keys: SameKeys = "refuse",
    same_images: SameImages = "refuse",
    copy: bool = False,
    on_converted: Callable[[ConvertReport], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_room: Callable[[Room], None] | None = None,
) -> ChangeReport:
    """Makes a new set in the folder `new` from the set in `out` and the images in `src`.

    The images are converted with the options in the provenance of `out`, into a folder next to `new` that is removed at
    the end; an interrupted call resumes from that folder. `convert` describes the arguments from `source` to `max_bad`,
    and `on_progress`; `merge` describes the other arguments. `on_converted` is called with the report of the
    conversion.

    Raises ConvertError if the options of `out` are unknown, and the errors of `convert` and `merge`.
    """
    options = MergeOptions(only_common, same_keys, same_images)
    parent = open_parent(out)
    path = Path(os.path.abspath(new))
    added = path.with_name(f".{path.name}.added")
    if os.path.lexists(new) and looks_like_a_set(added):  # a call that was killed when all was done
        _remove(added, path)
    target = check_target(new, [parent])
    is_folder = isinstance(src, (str, os.PathLike)) and os.path.isdir(src)  # whose own labels are integers, or none
    _check_parent(
        parent, options, has_columns=_has_columns(src, table), may_have_numbers=table is not None or not is_folder
    )
    chosen = _options_of(parent).describe()
    chosen["shard_size"] = chosen.pop("shard_nbytes")
    chosen.pop("also", None)  # the other sizes are arrays, which `_check_parent` refuses or the merge leaves out
    with _naming_folder(added, path):
        report = convert(
            src,
            added,
            source=source,
            labels=labels,
            empty_classes=empty_classes,
            workers=workers,
            max_bad=max_bad,
            table=table,
            on_progress=on_progress,
            **chosen,
        )
    if on_converted is not None:
        on_converted(report)
    with _naming_folder(added, path):
        made = carry_out_merge([parent, open_parent(added)], target, options, Carrying(copy, on_room), "append")
    _remove(added, path)
    return replace(made, notes={"num_added": dict(report.num_samples), "refused": dict(report.refused)})


def _has_columns(src: Src, table: Tables | None) -> bool:
    tables = table.values() if isinstance(table, Mapping) else (table, src)
    return any(one.columns for one in tables if isinstance(one, Table))


@contextlib.contextmanager
def _naming_folder(added: Path, new: Path) -> Iterator[None]:
    """Adds the path of the converted images to an error, unless another call has already made `new` from them."""
    try:
        yield
    except (ShardioError, OSError) as error:
        is_kept = looks_like_a_set(added)
        if not is_kept and os.path.lexists(new):
            raise taken(new) from None
        if is_kept and isinstance(error, ShardioError):
            kept = f"images are kept in {added}: give the same SRC to continue with them, or remove that folder"
            error.args = (*error.args, kept)
        raise


def _remove(added: Path, new: Path) -> None:
    """Removes the folder of converted images. It is first renamed to a temporary name, which later calls clean up: if
    this call is killed halfway, no call must resume from the rest."""
    # OSError: another call has just removed it.
    with contextlib.suppress(OSError), temporary_folder(new) as (hidden, _):
        added.rename(hidden.path)


def _check_parent(parent: Parent, options: MergeOptions, *, has_columns: bool, may_have_numbers: bool) -> None:
    """Raises ConvertError if new images cannot be merged with the set, before they are converted.

    They have no arrays, but numbers as labels if `may_have_numbers`.
    """
    if options.only_common:
        return
    for name, split in parent.manifest.splits.items():
        arrays = [array for array in split.arrays if array != LABELS_NAME or not may_have_numbers]
        if arrays and parent.manifest.sample_shape is not None:
            raise ConvertError(
                f"{parent.folder}: split {name!r} has arrays ({', '.join(arrays)}), which new images do not "
                "have: leave them out by `--only-common`, from Python `only_common=True`, and add arrays of all "
                "samples later"
            )
        if split.index.columns and not has_columns:
            raise ConvertError(
                f"{parent.folder}: split {name!r} has columns ({', '.join(c for c, _ in split.index.columns)}): give "
                "a table of the new images by `--table` and `--column`, or leave them out by `--only-common`"
            )


def _options_of(parent: Parent) -> ConvertOptions:
    """Returns the options that the set was converted with. Raises ConvertError if they are unknown or differ."""
    told = [one["conversion"] for one in conversions_of(parent.manifest)]
    try:
        found = [read_options(one) for one in told]
    except ValueError as error:
        raise ConvertError(f"{parent.folder}: {error}") from None
    # The provenance only describes: the manifest decides whether a split is squashed.
    squashed = {split.squashed for split in parent.manifest.splits.values()}
    fits = all(one == found[0] and squashed == {one.fit == "squash"} for one in found)
    if not found or not fits or found[0].sample_shape != parent.manifest.sample_shape:
        what = "several conversions with different options" if found else "a set that `convert` did not make"
        raise ConvertError(
            f"{parent.folder}: expected images that were all converted with the same options, found {what}: "
            "convert the new images by `shardio convert`, and merge both sets by `shardio merge`"
        )
    return found[0]
