"""`python -m trtmesh.tokenizer`: runs a tokenizer."""

import trtmesh.chassis.environment  # noqa: F401, I001 - gRPC reads the environment when it is first imported

import sys

from trtmesh.chassis.service import run
from trtmesh.tokenizer.service import TokenizerService
from trtmesh.tokenizer.settings import TokenizerSettings

if __name__ == "__main__":
    sys.exit(run(TokenizerSettings, TokenizerService, sys.argv[1:]))
