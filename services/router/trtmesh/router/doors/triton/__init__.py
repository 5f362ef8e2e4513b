"""The Triton front door: KServe v2 requests in, the mesh's own requests out, and their events back as tensors."""
