"""`compute_array`: applies a function, such as an encoder, to all images of a set, and makes a set with the results.

A batch is done when its file is in a hidden folder next to the new set. The name of the folder has a digest of the
arguments. So nothing is lost when ranks are killed, and ranks need no connection to each other.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from shardio.augment.chain import Transform
from shardio.augment.checks import check_whole
from shardio.changes.carry import Carrying, ChangeReport, carry_out
from shardio.changes.change import add_arrays
from shardio.changes.parents import open_parent
from shardio.errors import ConvertError, LaunchError, ShardioError, SpaceError, show
from shardio.format.layout import ArrayKind, RowType, check_array_name, check_kind
from shardio.format.manifest_file import check_split, load_manifest
from shardio.loading.loader import ShardLoader
from shardio.loading.options import choose_device
from shardio.loading.world import World, find_world
from shardio.sets.given import ArrayFile
from shardio.sets.history import describe_change
from shardio.sets.new_folder import taken
from shardio.system.files import make_folder, write_atomic

_PLAN_NAME = "plan.json"
_SUFFIX = ".computing"
# The seconds between two looks. Many ranks look, and the folder may have thousands of files on a server.
_LEAST_PAUSE, _MOST_PAUSE = 0.05, 5.0


def compute_array(
    out: str | os.PathLike[str],
    new: str | os.PathLike[str],
    name: str,
    function: Callable[[torch.Tensor], torch.Tensor | NDArray[Any]],
    *,
    tag: str,
    dtype: DTypeLike,
    shape: Sequence[int],
    kind: ArrayKind = "array",
    split: str | None = None,
    batch_size: int = 256,
    transform: Transform | None = None,
    images: str = "",
    device: str | torch.device | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout_seconds: float = 1800.0,
) -> ChangeReport | None:
    """Makes a new set with the results of `function` as the array `name`. Call it in all ranks of a job.

    - `function`: gets images as a ShardLoader delivers them, (B, ...), after `transform`, and returns (B, ...), values
      of `shape`. It runs without gradients. Results are cast to `dtype`.
    - `tag`: names the model, and is recorded. After a kill, the same call resumes; a call with another tag is refused.
    - `batch_size`: samples per call, for any number of ranks, so ranks on CPUs compute the same bytes.
    - `split`: where the set has several; `images`, `device`, `rank` and `world_size` are as for ShardLoader.
    - `timeout_seconds`: ranks wait for each other while batches are finished at least this often.

    Returns, in all ranks, when the set is there: the report in rank 0, None in the others. Raises ConvertError,
    LaunchError, SpaceError, the errors of `function`, and ValueError for results of another shape or not finite.
    """
    world = find_world(rank, world_size)
    check_whole("batch_size", batch_size, 1)
    if not isinstance(tag, str) or not tag:
        raise ValueError(f"tag must be a text that names the model; found {tag!r}")
    if transform is not None and not isinstance(transform, Transform):
        raise TypeError(
            f"transform must be from shardio.augment: call other functions in `function`; found {transform!r}"
        )
    parent = open_parent(out)
    manifest = parent.manifest
    if manifest.sample_shape is None and not images:
        raise ConvertError(f"{parent.folder}: found no pixels: name an array of pictures by images=")
    if split is None and len(manifest.splits) > 1:
        names = ", ".join(sorted(manifest.splits))
        raise ConvertError(f"{parent.folder}: an array goes into one split, found {names}: choose one by split=")
    split = next(iter(manifest.splits)) if split is None else split
    check_split(parent.folder, manifest, split)
    row = RowType(np.dtype(dtype).str, tuple(shape))
    check_kind(check_array_name(name), kind, row, manifest.sample_shape)
    arguments = {
        "split": split,
        "name": name,
        "tag": tag,
        "kind": kind,
        "dtype": row.dtype,
        "shape": list(row.shape),
        "batch_size": batch_size,
        "images": images,
        "transform": transform and transform.to_dict(),
    }
    plan = describe_change("compute_array", arguments, [manifest])["change"]
    target = Path(os.path.abspath(new))
    batches = _Batches(target, plan, manifest.splits[split].num_samples, batch_size)
    if os.path.lexists(target):
        if not batches.are_published():
            raise taken(target)
        return None
    batches.begin(row)
    done = batches.done()
    if mine := [number for number in range(world.rank, len(batches), world.world_size) if number not in done]:
        loader = ShardLoader(
            out,
            batch_size,
            split=split,
            shuffle=False,
            tail="short",
            indices=batches.samples(mine),
            rank=0,
            world_size=1,
            device=choose_device(device, world),
            transform=transform,
            images=images,
        )
        with loader, torch.no_grad():
            for number, (pictures, *_) in zip(mine, loader, strict=True):
                batches.write(number, _as_rows(function(pictures), row, batches.samples([number])))
    report = None
    if world.rank:
        batches.wait(world, timeout_seconds, batches.are_published)
    else:
        batches.wait(world, timeout_seconds, lambda: len(batches.done()) == len(batches))
        draft = add_arrays(parent.draft, split, {name: batches.rows()}, {name: kind}, None)
        report = carry_out(draft, target, "compute_array", arguments, [parent], Carrying())
    batches.remove()
    return report


def _as_rows(values: object, row: RowType, samples: NDArray[np.int64]) -> NDArray[Any]:
    """Returns the results for `samples` as rows. Raises ValueError if they have another shape, or are not finite."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    shape = (len(samples), *row.shape)
    where = f"function, samples {samples[0]} to {samples[-1]}"
    if (
        not isinstance(values, np.ndarray)
        or values.shape != shape
        or not np.can_cast(values.dtype, row.dtype, "same_kind")
    ):
        found = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else show(values)
        raise ValueError(f"{where}: expected {np.dtype(row.dtype)} {shape}, found {found}")
    with np.errstate(over="ignore"):
        rows = values.astype(row.dtype)
    if rows.dtype.kind == "f" and not np.isfinite(rows).all():
        wrong = samples[int(np.argwhere(~np.isfinite(rows))[0][0])]
        raise ValueError(f"{where}: expected finite {rows.dtype} numbers, found others for sample {wrong}")
    return rows


class _Batches:
    """The files of finished batches, in a hidden folder next to the new set. Ranks share it."""

    def __init__(self, target: Path, plan: Mapping[str, Any], num_samples: int, batch_size: int) -> None:
        self._target = target
        self._text = json.dumps(plan, sort_keys=True, indent=1).encode()
        self._plan = json.loads(self._text)  # as a manifest has it: JSON has no tuples
        digest = hashlib.sha256(self._text).hexdigest()[:12]
        self._folder = target.with_name(f".{target.name}.{digest}{_SUFFIX}")
        self._num_samples = num_samples
        self._batch_size = batch_size

    def __len__(self) -> int:
        return -(-self._num_samples // self._batch_size)

    def samples(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        """Returns the samples of these batches."""
        places = np.array(numbers)[:, None] * self._batch_size + np.arange(self._batch_size)
        return places[places < self._num_samples]

    def begin(self, row: RowType) -> None:
        """Makes the folder. Raises ConvertError if there is a folder of another computation, and SpaceError."""
        for name in os.listdir(self._target.parent):
            if name.startswith(f".{self._target.name}.") and name.endswith(_SUFFIX) and name != self._folder.name:
                other = self._target.with_name(name)
                raise ConvertError(
                    f"{other}: {self._difference(other)}. Give the arguments of that call to resume it, or remove this "
                    "folder to start over"
                )
        make_folder(self._folder)
        write_atomic(self._folder / _PLAN_NAME, self._text)
        needed = (2 * self._num_samples - len(self.done()) * self._batch_size) * row.nbytes
        if needed > (free := shutil.disk_usage(self._folder).free):
            raise SpaceError(
                f"{self._target.parent}: expected room for {needed:,} bytes, the array and its batches, found {free:,} "
                "free"
            )

    def _difference(self, other: Path) -> str:
        try:
            theirs = json.loads((other / _PLAN_NAME).read_bytes())
        except (OSError, ValueError):
            return "expected this computation, found another, without a plan"
        mine, theirs = ({**plan["arguments"], "set": plan["parents"]} for plan in (self._plan, theirs))
        name = next(name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name))
        return f"expected {name} {show(mine.get(name))}, found batches of {name} {show(theirs.get(name))}"

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:09}.npy"

    def done(self) -> set[int]:
        names = os.listdir(self._folder) if self._folder.exists() else []
        return {int(name[:9]) for name in names if name.endswith(".npy") and name[:9].isdigit()}

    def write(self, number: int, rows: NDArray[Any]) -> None:
        content = io.BytesIO()
        np.save(content, rows)
        write_atomic(self._path(number), content.getbuffer())

    def are_published(self) -> bool:
        """Returns whether the new set is there."""
        try:
            return bool(load_manifest(self._target).provenance.get("change") == self._plan)
        except (ShardioError, OSError):
            return False

    def rows(self) -> Iterator[NDArray[Any]]:
        """Yields the rows of all batches in order. The other ranks see the plan's time change, and keep waiting."""
        for number in range(len(self)):
            os.utime(self._folder / _PLAN_NAME)
            yield ArrayFile(self._path(number))[: self._batch_size]

    def wait(self, world: World, seconds: float, is_over: Callable[[], bool]) -> None:
        """Waits until `is_over` returns True. Raises LaunchError if no rank does anything for `seconds`."""
        before, since, pause = None, time.monotonic(), _LEAST_PAUSE
        while not is_over():
            try:
                now = (len(os.listdir(self._folder)), os.stat(self._folder / _PLAN_NAME).st_mtime_ns)
            except FileNotFoundError:  # rank 0 is about to return
                now = None
            if now != before:
                before, since = now, time.monotonic()
            pause = min(2 * pause, _MOST_PAUSE)
            if time.monotonic() - since > seconds:
                missing = {*range(len(self))} - self.done()
                ranks = ", ".join(map(str, sorted({number % world.world_size for number in missing})[:8])) or "0"
                raise LaunchError(
                    f"{self._folder}: rank {world.rank} waited {seconds:g} s for rank {ranks}, while {len(missing):,} "
                    f"of {len(self):,} batches are missing: the same call, on any number of ranks, resumes"
                )
            time.sleep(pause)

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
