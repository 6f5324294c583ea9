"""Plugins of our own: each folder brings one capability whole, and may be deleted."""
