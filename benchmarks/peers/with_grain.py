"""Grain over ArrayRecord: exact random order, read by threads and copied into batches by worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("grain", "array_record")
LABEL_NBYTES = 8


def prepare(samples: np.ndarray, out: Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    np.save(out / "shape.npy", samples.shape[1:])
    writer = ArrayRecordWriter(str(out / "samples.array_record"), "group_size:1,uncompressed")
    for number, sample in enumerate(samples):
        writer.write(number.to_bytes(LABEL_NBYTES, "little") + sample.tobytes())
    writer.close()


def decoded(shape: tuple[int, ...], record: bytes) -> tuple[Any, int]:
    pixels = np.frombuffer(record, np.uint8, offset=LABEL_NBYTES).reshape(shape)
    return pixels, int.from_bytes(record[:LABEL_NBYTES], "little")


def opened(processes: bool) -> Any:
    def way(out: Path, batch_size: int, workers: int, repeats: int) -> Any:
        import grain

        shape = tuple(map(int, np.load(out / "shape.npy")))
        source = grain.sources.ArrayRecordDataSource([str(out / "samples.array_record")])

        def epoch(number: int) -> Iterator[tuple[Any, Any]]:
            samples = grain.MapDataset.source(source).shuffle(seed=number).repeat(repeats).map(partial(decoded, shape))
            read = samples.to_iter_dataset(grain.ReadOptions(num_threads=0 if processes else workers))
            batches = read.batch(batch_size, drop_remainder=False)
            if processes:
                batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
            yield from batches

        return epoch

    return way


WAYS = {"Grain, ArrayRecord, threads": opened(False), "Grain, ArrayRecord, processes": opened(True)}
