"""Trained models: taken from a run, begun from, exported."""
