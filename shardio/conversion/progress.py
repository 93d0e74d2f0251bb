"""The progress bar of a conversion."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from shardio.conversion.report import Progress
from shardio.errors import shortened
from shardio.system.progress import Bar

T = TypeVar("T")
Tell = Callable[[Progress], None]


class ImagesBar(Bar):
    """Counts images. Those that earlier calls have made are no speed of this one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(unit=" images", smoothing=0.1, **options)

    def show(self, progress: Progress) -> None:
        """Takes what `convert(on_progress=)` is called with."""
        self.begun()
        if self.total is None:
            self.reset(progress.total)
            if progress.found:
                kept = f"going on: {progress.found:,} of {progress.total:,} images were kept"
                self.write(f"shardio: {kept}", file=sys.stderr)
        if not self.disable:  # the rate, and the time that is left, are those of what this call does itself
            more_kept = progress.kept - self.initial
            self.n, self.initial, self.last_print_n = self.n + more_kept, progress.kept, self.last_print_n + more_kept
        spooling = progress.spooled and not progress.done
        self.set_description(f"copying out of parquet: {progress.spooled:,}" if spooling else None, refresh=False)
        self.set_postfix(refused=progress.refused, refresh=False)
        self.update(progress.done - self.n)


def run_with_bar(run: Callable[[Tell], T], src: object, on_progress: Tell | None = None) -> T:
    """Returns what `run` returns, while a bar shows what it tells, which `on_progress` is told, too."""
    what = shortened(os.fspath(src), 30) if isinstance(src, (str, os.PathLike)) else "the dataset"
    with ImagesBar() as bar, bar.before_it_begins(f"scanning {what}"):

        def tell(progress: Progress) -> None:
            bar.show(progress)
            if on_progress is not None:
                on_progress(progress)

        return run(tell)
