"""Measurements: each prints one JSON line and a short table, and compares within one run."""
