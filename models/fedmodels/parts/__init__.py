"""What both halves of a run know of its parts; ``fedmodels/training/wire.py`` has the list."""
