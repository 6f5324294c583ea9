"""A run from outside: its events as they come, whether it serves, and what operators ask of it."""
