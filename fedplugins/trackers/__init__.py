"""Trackers of experiments, and metrics for Prometheus: what follows the scores of a run."""
