"""Answers of the models that are live now, over HTTP and gRPC, and labels that come back."""
