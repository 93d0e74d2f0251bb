"""The kinds of collections that are converted: each becomes one Collection of sources."""
