"""The Open Inference Protocol over gRPC, beside the HTTP of ``fedcli serve-model``."""
