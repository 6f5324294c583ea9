"""Answers of the model that is live now: over HTTP, and for the files of a watched folder."""
