"""Options of `trtmesh generate` for fields of GenerationConfig; types and defaults are those of the fields."""

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

TYPES = {
    FieldDescriptor.CPPTYPE_UINT32: int,
    FieldDescriptor.CPPTYPE_UINT64: int,
    FieldDescriptor.CPPTYPE_FLOAT: float,
    FieldDescriptor.CPPTYPE_STRING: str,
}
MOST = {FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1, FieldDescriptor.CPPTYPE_UINT64: 2**64 - 1}


@dataclass(frozen=True, slots=True)
class ConfigOption:
    """An option for the field that `Client.generate` calls `keyword`."""

    keyword: str
    help: str
    """{default} in it stands for the value of an unset field."""
    least: int = 0
    """Least value of a number without a fraction."""
    name: str = ""
    """Name of the option, if it is not that of the keyword."""

    def parameter(self) -> Parameter:
        """Returns the option as a parameter of a typer command."""
        group = GROUP_OF[self.keyword]
        message = GenerationConfig.DESCRIPTOR.fields_by_name[group].message_type
        field = message.fields_by_name[self.keyword]
        default = getattr(getattr(Defaults(), group), self.keyword)
        most = MOST.get(field.cpp_type)
        option = typer.Option(
            "--" + (self.name or self.keyword).replace("_", "-"),
            min=None if most is None else self.least,
            max=most,
            help=self.help.format(default=default),
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
    ConfigOption("min_tokens", "Fewest new tokens; unset means {default:g}."),
    ConfigOption(
        "temperature",
        "Divides the scores before a draw; 0 is greedy. Unset means 1 beside --top-k, --top-p or --min-p, else greedy.",
    ),
    ConfigOption("top_k", "Keep the k most likely tokens; -1 is off. Unset keeps all.", least=-1),
    ConfigOption("top_p", "Keep tokens up to this probability; unset keeps all."),
    ConfigOption("min_p", "Drop tokens below this share of the likeliest; unset keeps all."),
    ConfigOption("seed", "Seed of the draws; unset, the router draws one."),
    ConfigOption(
        "repetition_penalty",
        "Divides the scores of tokens that occurred; unset means {default:g}, none.",
    ),
    ConfigOption(
        "presence_penalty",
        "Subtracted from the scores of tokens that occurred; unset means {default:g}.",
    ),
    ConfigOption(
        "frequency_penalty",
        "The same for each time that they occurred; unset means {default:g}.",
    ),
    ConfigOption("stop_texts", "Text that ends a sequence; repeatable.", name="stop"),
    ConfigOption("end_id", "Token id that ends a sequence; unset means the model's."),
    ConfigOption(
        "num_return_sequences",
        "Sequences per prompt; with beams, the best ones. Unset means {default:g}, or all beams.",
        least=1,
        name="sequences",
    ),
    ConfigOption(
        "beam_width",
        "Beams; all are returned without --sequences. Unset means {default:g}: no beam search.",
        least=1,
    ),
)


def takes_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Makes a typer command of `command(..., config_fields)`, with the options in place of that parameter: it gets
    those that are set, by keyword of `Client.generate`."""

    def with_fields(**values: Any) -> None:
        given = {option.keyword: values.pop(option.keyword) for option in OPTIONS}
        given = {keyword: value for keyword, value in given.items() if value not in (None, [])}
        command(config_fields=given, **values)

    parameters: list[Parameter] = []
    for each in inspect.signature(command, eval_str=True).parameters.values():
        is_place = each.name == "config_fields"
        parameters += [option.parameter() for option in OPTIONS] if is_place else [each]
    return with_options(with_fields, parameters, like=command)
