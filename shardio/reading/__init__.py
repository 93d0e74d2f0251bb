"""An opened split: `gather(indices, out)` brings samples into memory that the caller owns. No torch.

`loading` calls it from its threads.
"""
