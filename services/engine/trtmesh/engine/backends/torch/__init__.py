"""The torch backend: in-flight batching over a paged KV cache for the model code of transformers.

Importing this package does not import torch; starting the backend does.
"""

from trtmesh.engine.backends.torch.backend import TorchBackend
from trtmesh.engine.backends.torch.settings import TorchSettings

__all__ = ["TorchBackend", "TorchSettings"]
