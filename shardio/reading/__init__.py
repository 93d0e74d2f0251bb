"""An opened split: `gather(indices, out)` brings samples into memory that the caller owns. No torch.

It takes sample indices, and fills arrays; `loading` calls it from its threads.
"""
