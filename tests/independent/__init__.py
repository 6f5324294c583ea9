"""The four papers' methods and baselines a second time, in plain torch, compared with our methods.

What stands here was written from the papers and not from the methods. It shares no arithmetic with
them: losses, optimisers, clusters and means are all its own; what generators draw is ours. Clients
take whole training sets as batches, so that no random order matters; in the whole run and in those
of the baselines the order of examples is ours.
"""
