"""The wire: the schema, its generated stubs, and the codec between bundles and frames."""

PROTOCOL = 7
"""What both sides must speak; changes whenever one would misunderstand the other."""
SERVICE = "fedpb.v1.CoordinatorService"
"""Name of the gRPC service, as the schema has it."""
AGAIN_AFTER = "fedtide-again-after-ms"
"""Trailing metadata of a refusal that is no final one: when to make the same call again."""
FRONT = "fedpb.v1.FrontService"
"""Likewise of the service of a queue's front."""
SET_OUT = "fedtide-set-out"
"""Trailing metadata of a final refusal to join: the client that takes no part any more."""
CROWDED = "Concurrent RPC limit exceeded!"
"""What gRPC's server says where more calls wait than it bears; the same call may be made again."""
