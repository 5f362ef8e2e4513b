"""Options of `trtmesh generate` for fields of GenerationConfig; types and defaults come from the fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter
from typing import Annotated, Any

import typer
from google.protobuf.descriptor import FieldDescriptor
from trtmesh.chassis.vocabulary import GenerationConfig as Defaults
from trtmesh.cli.option_groups import with_options
from trtmesh.client import GenerationConfig
from trtmesh.client.options import GROUP_OF
from trtmesh.v1.generation_fields import HELP, NEGATIVE_IS_UNSET

TYPES = {
    FieldDescriptor.CPPTYPE_UINT32: int,
    FieldDescriptor.CPPTYPE_UINT64: int,
    FieldDescriptor.CPPTYPE_FLOAT: float,
    FieldDescriptor.CPPTYPE_STRING: str,
}
MOST = {FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1, FieldDescriptor.CPPTYPE_UINT64: 2**64 - 1}

LEAST = dict.fromkeys(NEGATIVE_IS_UNSET, -1)
"""Least values of numbers without a fraction; others begin at 0."""


@dataclass(frozen=True, slots=True)
class ConfigOption:
    """An option for the field with `keyword` in `Client.generate`."""

    keyword: str
    help: str
    least: int = 0
    """Least value of a number without a fraction."""
    name: str = ""
    """Name of the option, if different from the keyword."""

    def parameter(self) -> Parameter:
        group = GROUP_OF[self.keyword]
        message = GenerationConfig.DESCRIPTOR.fields_by_name[group].message_type
        field = message.fields_by_name[self.keyword]
        default = getattr(getattr(Defaults(), group), self.keyword)
        most = MOST.get(field.cpp_type)
        says_default = not isinstance(default, int | float) or "nset means" in self.help
        option = typer.Option(
            "--" + (self.name or self.keyword).replace("_", "-"),
            min=None if most is None else self.least,
            max=most,
            help=self.help if says_default else f"{self.help} Unset means {default:g}.",
        )
        value: Any = TYPES[field.cpp_type]
        several: Any = list[value]
        optional = (several if field.is_repeated else value) | None
        return Parameter(
            self.keyword,
            Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[optional, option],
        )


OPTIONS = (
    ConfigOption("max_tokens", "Most new tokens; unset means up to the model's length.", least=1),
    ConfigOption("min_tokens", "Fewest new tokens."),
    *(ConfigOption(keyword, text, LEAST.get(keyword, 0)) for keyword, text in HELP.items()),
    ConfigOption("stop_texts", "Text that ends a sequence; repeatable.", name="stop"),
    ConfigOption("end_id", "Token id that ends a sequence; unset means the model's."),
    ConfigOption(
        "num_return_sequences",
        "Sequences per prompt; with beams, the best. Unset means 1, or all beams.",
        least=1,
        name="sequences",
    ),
    ConfigOption("beam_width", "Beams; all are returned without --sequences.", least=1),
)
"""In the order of the help. A field of SamplingConfig with a help in the proto has an option."""


def takes_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Makes a typer command of `command(..., config_fields)`. The options stand in place of the parameter
    `config_fields`, a mapping of the set options by keyword of `Client.generate`."""

    def with_fields(**values: Any) -> None:
        given = {option.keyword: values.pop(option.keyword) for option in OPTIONS}
        given = {keyword: value for keyword, value in given.items() if value not in (None, [])}
        command(config_fields=given, **values)

    parameters: list[Parameter] = []
    for each in inspect.signature(command, eval_str=True).parameters.values():
        is_place = each.name == "config_fields"
        parameters += [option.parameter() for option in OPTIONS] if is_place else [each]
    return with_options(with_fields, parameters, like=command)
