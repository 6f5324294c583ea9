"""The live page of a run: its state as JSON, and one HTML file that draws it. Read-only."""
