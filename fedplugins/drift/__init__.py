"""Drift: whose inputs and predictions moved since earlier tasks, told with few false alarms."""
