"""The rounds of a run: schedule, aggregation, scores and summary, over any cohort.

May import ``state`` and fedmodels; knows nothing of gRPC.
"""
