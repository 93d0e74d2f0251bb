"""A split that is read where it lies and one that comes through a cache keep the same contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from pictures import sample_pixels

from shardio.cache.cached_split import open_source
from shardio.cache.stage import stage
from shardio.errors import SetNotFoundError
from shardio.reading.source import SplitSource

NUM_SAMPLES = 23
# Where the cache is empty, or complete, when the split is opened.
KINDS = ("local", "empty cache", "full cache")


@pytest.fixture(params=KINDS)
def source(request: pytest.FixtureRequest, make_set: Callable[..., Path], tmp_path: Path) -> Iterator[SplitSource]:
    path = make_set(NUM_SAMPLES)
    if request.param == "full cache":
        stage(path, tmp_path / "cache")
    source = open_source(path, "train", None if request.param == "local" else tmp_path / "cache", None)
    yield source
    source.close()


def test_a_source_opens_its_split_and_reads_and_rereads_every_sample(source: SplitSource) -> None:
    indices = np.arange(NUM_SAMPLES)[::-1].copy()
    assert source.num_samples == NUM_SAMPLES
    shards = source.open(iter([indices]))
    assert len(shards) == NUM_SAMPLES
    out = np.zeros((2, NUM_SAMPLES, *shards.sample_shape), np.uint8)
    reader, second = source.make_reader("auto", NUM_SAMPLES), source.make_second()
    reader.read(indices, out[0])
    second.read(indices, out[1])
    for index, one, other in zip(indices.tolist(), *out, strict=True):
        assert np.array_equal(one, sample_pixels(index))
        assert np.array_equal(other, sample_pixels(index))
    assert reader.counts().nbytes == second.counts().nbytes == out[0].nbytes
    reader.close()
    second.close()


def test_a_source_tells_why_it_reads_so_and_may_be_stopped_and_closed_again(source: SplitSource) -> None:
    source.open([])
    source.make_reader("pread", NUM_SAMPLES)
    told = source.describe()
    assert set(told) == {"io_reason", "staging"}
    assert "io='pread'" in told["io_reason"]
    for _ in range(2):
        source.stop()
        source.close()


@pytest.mark.parametrize("cached", [False, True])
def test_a_split_that_is_not_there_is_refused(cached: bool, make_set: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(SetNotFoundError, match="expected a split 'val', found train"):
        open_source(make_set(NUM_SAMPLES), "val", tmp_path / "cache" if cached else None, None)
