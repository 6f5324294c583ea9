"""Whoever looks at a run from outside: its events as they come, and whether it serves."""
