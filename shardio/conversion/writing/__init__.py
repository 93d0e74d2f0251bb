"""From pixels to files: shards, indexes, and at last the manifest."""
