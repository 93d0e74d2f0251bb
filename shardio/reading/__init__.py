"""Opened splits, and readers that copy samples into memory of the caller: `gather(indices, out)`. No torch.

The threads of `shardio.loading` call the readers.
"""
