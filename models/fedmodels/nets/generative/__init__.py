"""Nets that draw: GANs, diffusion, flows, and what is trained without data.

May import ``nets`` and what ``nets`` may import.
"""
