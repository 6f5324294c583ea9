"""The rounds of a run: schedule, aggregation, scores and summary, over any cohort.

Knows nothing of gRPC.
"""
