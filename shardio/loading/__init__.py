"""ShardLoader, which brings batches to the training loop, with its threads, slots and copies to the device.

Uses the sample order of `shardio.order` and the readers of `shardio.reading`, and returns tensors.
"""
