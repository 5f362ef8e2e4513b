"""Turns model repositories of Triton's TensorRT-LLM backend into a configuration of the mesh.

Nothing of a repository is executed: configurations are parsed, other files only looked up.
"""

from trtmesh.tools.triton_import.conversion import Conversion, convert_repository
from trtmesh.tools.triton_import.filling import parse_values
from trtmesh.tools.triton_import.findings import Finding, Outcome

__all__ = ["Conversion", "Finding", "Outcome", "convert_repository", "parse_values"]
