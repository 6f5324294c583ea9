"""Code that users bring: files and entry points."""
