"""From the bytes of an image to its pixels: checked, decoded, and fitted to one size."""
