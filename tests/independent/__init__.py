"""The four papers' methods a second time, in plain torch, and our methods compared with them.

What stands here was written from the papers and not from the methods. It shares no arithmetic with
them: losses, optimisers, clusters and means are all its own; what generators draw is ours. Clients
take whole training sets as batches, so that no random order matters, but in the whole run.
"""
