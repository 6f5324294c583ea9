"""Differential privacy: what noise covers of an upload, how it is bounded, and what it costs.

``[privacy] level`` turns it on. docs/differential-privacy.md says who is trusted, and what is
promised.
"""
