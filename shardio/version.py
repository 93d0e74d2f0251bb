"""The version of the package. The version of the format on disk is `shardio.format.layout.FORMAT_VERSION`."""

__version__ = "0.2.0"
