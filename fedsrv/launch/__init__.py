"""A run by one command: its coordinator here, its hosts here or on a cluster, watched and ended."""
