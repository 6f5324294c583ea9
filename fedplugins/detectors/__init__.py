"""Detectors of one's own on the errors of each client's model (``[evaluate] detector``)."""
