"""Secure aggregation after Bonawitz et al.: keys and shares, masks, fixed-point numbers."""
