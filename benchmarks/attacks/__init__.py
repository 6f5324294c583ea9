"""Attacks on runs: what one or a few clients do to everybody, and what messages tell."""
