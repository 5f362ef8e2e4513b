"""What a model recommends for requests, in its generation_config.json."""

from __future__ import annotations

import logging
from pathlib import Path

from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.model_dir import read_optional
from trtmesh.chassis.parsing import parse_config
from trtmesh.v1 import generation_pb2 as pb

log = logging.getLogger(__name__)

FILE = "generation_config.json"
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields that others take too. End ids are of the engine, which reads the same file."""


def read_defaults(model_dir: Path) -> pb.GenerationConfig:
    """The defaults of the file; a value that no request may have is a warning. Raises ModelUnusable."""
    given = read_optional(model_dir / FILE)
    defaults = pb.GenerationConfig()
    for name in (*SAMPLING, "max_new_tokens"):
        if (value := given.get(name)) is None:
            continue
        one = pb.GenerationConfig()
        try:
            if name in SAMPLING:
                setattr(one.sampling, name, value)
            else:
                one.stopping.max_tokens = value
            parse_config(one)
        except (InvalidField, TypeError, ValueError) as error:
            log.warning("%s: %s is left out: %s", model_dir / FILE, name, error)
        else:
            defaults.MergeFrom(one)
    return defaults
