"""Model repositories of Triton's TensorRT-LLM backend, read and turned into a configuration of the mesh.

Nothing of a repository is executed: its configurations are parsed, and its other files are only looked for.
"""

from trtmesh.cli.triton_import.conversion import Conversion, convert_repository
from trtmesh.cli.triton_import.findings import Finding, Outcome

__all__ = ["Conversion", "Finding", "Outcome", "convert_repository"]
