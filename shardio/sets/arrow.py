"""Parquet files through pyarrow, which the extra `parquet` installs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardio.errors import SourceError
from shardio.system.opening import check_unpacked

# Memory is bounded, as columns are read in pieces of this size and nothing ahead of them. pyarrow would otherwise keep
# every row group that was read until the last one is.
_BUFFER_NBYTES = 1 << 20


def check_installed(path: Path) -> None:
    """Raises SourceError, naming `path`, if pyarrow is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise SourceError(
            f"{path}: pyarrow is needed to read parquet, but is not installed. Install it: "
            'pip install "shardio[parquet]"'
        ) from None


@contextlib.contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """Yields the file as a pyarrow.parquet.ParquetFile, and closes it at the end of the `with` block.

    Raises SourceError if the file is damaged, also inside the block, or if pyarrow is not installed. Other errors
    inside the block pass through.
    """
    check_installed(path)
    import pyarrow.parquet

    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise SourceError(f"{path}: expected a path in UTF-8, which pyarrow requires: rename the file") from None
    try:
        # Checksums of pages are compared where a file has them.
        with pyarrow.parquet.ParquetFile(
            path, buffer_size=_BUFFER_NBYTES, pre_buffer=False, page_checksum_verification=True
        ) as file:
            yield file
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # names of columns may be any bytes
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's; pyarrow's errors about damage have no number
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise SourceError(f"{path}: expected a sound parquet file, found: {first_line}") from None


def read_table(path: Path, file: Any, columns: Sequence[str]) -> Any:
    """Returns the `columns` as a pyarrow.Table. Raises SourceError for a decompression bomb.

    `file` comes from `open_parquet(path)`.
    """
    import pyarrow

    batches = []
    for batch in file.iter_batches(columns=columns, use_threads=False):
        batches.append(batch)
        check_unpacked(path, sum(one.nbytes for one in batches))
    return pyarrow.Table.from_batches(batches, pyarrow.schema([file.schema_arrow.field(name) for name in columns]))
