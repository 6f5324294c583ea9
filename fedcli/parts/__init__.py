"""The parts of a client: each is one capability that a config can leave out.

The list of all parts is ``LISTED`` of :mod:`fedmodels.config.combinations`; its order is the order
at every seam (:class:`fedcli.runtime.client_part.ClientPart`).
"""
