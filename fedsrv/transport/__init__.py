"""Clients over the network: the gRPC service, sessions, open trips, upload buffers."""
