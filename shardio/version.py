"""The version of the package. The version of the format on disk is `shardio.format.layout.FORMAT_VERSIONS`."""

__version__ = "0.1.0"
