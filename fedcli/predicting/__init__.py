"""Predictions of a trained model for new inputs."""
