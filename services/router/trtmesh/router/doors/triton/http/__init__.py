"""Triton's HTTP door: JSON and binary tensors to the requests of the gRPC door, and its answers back."""
