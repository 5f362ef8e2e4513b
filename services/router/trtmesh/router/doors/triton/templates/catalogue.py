"""All templates, by their name in the settings."""

from __future__ import annotations

from collections.abc import Mapping

from trtmesh.router.doors.triton.settings import TemplateName
from trtmesh.router.doors.triton.templates.ensemble import ENSEMBLE, TENSORRT_LLM_BLS
from trtmesh.router.doors.triton.templates.gpt import GPT
from trtmesh.router.doors.triton.templates.llmapi import LLMAPI
from trtmesh.router.doors.triton.templates.template import Template
from trtmesh.router.doors.triton.templates.tensorrt_llm import (
    DISAGGREGATED_SERVING_BLS,
    TENSORRT_LLM,
)
from trtmesh.router.doors.triton.templates.tokenization import POSTPROCESSING, PREPROCESSING

DEFAULT_MODELS = (
    *(ENSEMBLE, TENSORRT_LLM_BLS, TENSORRT_LLM, PREPROCESSING, POSTPROCESSING),
    DISAGGREGATED_SERVING_BLS,
)
"""Served under their own names where no models are configured."""

TEMPLATES: Mapping[TemplateName, Template] = {
    template.name: template for template in (*DEFAULT_MODELS, LLMAPI, GPT)
}
