"""KServe messages as the JSON that Triton writes."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor


def as_json(message: Any) -> dict[str, Any]:
    """Every field under its name in the proto, also those at their default. Protobuf's own JSON has 64-bit numbers as
    texts; Triton's has numbers."""
    return {
        field.name: _field(message, field)
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _field(message: Any, field: FieldDescriptor) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of_values = field.message_type.fields_by_name["value"]
        return {str(key): _one(value[key], of_values) for key in value}
    if field.is_repeated:
        return [_one(element, field) for element in value]
    return _one(value, field)


def _one(value: Any, field: FieldDescriptor) -> Any:
    if field.message_type is not None:
        return as_json(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value
