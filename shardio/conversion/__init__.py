"""Images become a set: listed by `sources`, decoded by `images`, written by `writing`, on what `engines` offers.

`convert` is the way in; what comes out is a published set.
"""
