"""Reports of loaders for monitoring systems: what `ShardLoader(report_to=)` may be.

Each needs its package: tensorboard, or prometheus-client. Each rank of a node needs a folder, file or port of its own.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, get_args

from shardio.loading.report import Report, Stage

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_MEANINGS = {
    "images_per_second": "Images that the training loop received in a second",
    "waited_ratio": "Share of the loop's time in which it waited for data",
    "transform_ratio": "Share of the loop's time that the transform took",
    "waiting_seconds": "Time for which the loop has been waiting for the batch that is due",
    "batches": "Batches that the loop has received since the loader was made",
}


def _numbers_of(report: Report) -> dict[str, float]:
    values = (
        report.images_per_second,
        report.waited,
        report.transformed,
        report.waiting_seconds,
        float(report.num_batches),
    )
    return dict(zip(_MEANINGS, values, strict=True))


class TensorBoard:
    """Writes scalars for TensorBoard: into the folder `log`, or with the caller's own SummaryWriter.

    Steps are batches since the loader was made.
    """

    def __init__(self, log: str | os.PathLike[str] | SummaryWriter) -> None:
        self._writer: Any = log
        if isinstance(log, (str, os.PathLike)):
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(os.fspath(log))

    def __call__(self, report: Report) -> None:
        for name, value in _numbers_of(report).items():
            self._writer.add_scalar(f"shardio/{report.source.split}/{name}", value, report.num_batches)
        self._writer.flush()


class _Gauges:
    """Numbers of reports as Prometheus knows them."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Gauge

        self.registry = CollectorRegistry()
        labels = ["split", "rank"]
        self._gauges = {
            name: Gauge(f"shardio_{name}", meaning, labels, registry=self.registry)
            for name, meaning in _MEANINGS.items()
        }
        self._stages = Gauge("shardio_limited_by", "1 for what limits", [*labels, "stage"], registry=self.registry)

    def set(self, report: Report) -> None:
        where = (report.source.split, str(report.source.rank))
        for name, value in _numbers_of(report).items():
            self._gauges[name].labels(*where).set(value)
        for stage in get_args(Stage):
            self._stages.labels(*where, stage).set(stage == report.stage)


class PrometheusTextfile:
    """Writes a file for the textfile collector of Prometheus' node_exporter, and replaces it as a whole.

    `path` has to end with .prom. Raises ValueError if it does not, and FileNotFoundError without its folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.path.abspath(path)
        if not self._path.endswith(".prom"):
            raise ValueError(f"path: expected one that ends with .prom, as the collector reads no other; found {path}")
        if not os.path.isdir(folder := os.path.dirname(self._path)):
            raise FileNotFoundError(f"path: expected a file in a folder that exists; found {folder}")
        self._gauges = _Gauges()

    def __call__(self, report: Report) -> None:
        from prometheus_client import write_to_textfile

        self._gauges.set(report)
        write_to_textfile(self._path, self._gauges.registry)


class PrometheusPort:
    """Answers Prometheus at a port of this node, until `close` or the end of the process.

    Raises OSError if the port is taken.
    """

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        from prometheus_client import start_http_server

        self._gauges = _Gauges()
        self._server, self._thread = start_http_server(port, address, self._gauges.registry)
        self.port: int = self._server.server_port

    def __call__(self, report: Report) -> None:
        self._gauges.set(report)

    def close(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
