"""A relay: a coordinator to its clients, and one caller to the coordinator above it."""
