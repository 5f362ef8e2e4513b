"""Response templates as checkpoints have them, and texts with their markers."""

from __future__ import annotations

from typing import Any

GEMMA: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"close": ["<turn|>", "<eos>"]},
    },
}
"""Gemma 4."""
QWEN_CODER: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
            },
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
    },
}
"""Qwen 3.5 and Qwen3-Coder, whose arguments take their types from the schema."""
HARMONY: dict[str, Any] = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {
            "open": "<|channel|>analysis<|message|>",
            "close": "<|end|>",
            "repeats": True,
            "join": "\n",
        },
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"open": "<|channel|>final<|message|>", "close": "<|return|>"},
    },
}
"""gpt-oss, which leaves out what is in no channel."""
QWEN: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>"},
    },
}
"""Qwen 2.5, whose calls say their names in JSON."""

PIECES = {
    "gemma": (
        GEMMA,
        ["<|turn>model\n", "<|turn>model\n<|channel>thought\n"],
        ["<|channel>thought\n", "<channel|>", "<|tool_call>call:get", "{a:1}", '{b:<|"|>x<|"|>}',
         "{a:}", "[1]", "<tool_call|>", "<turn|>"],
    ),
    "qwen": (
        QWEN_CODER,
        ["<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n",
         "<|im_start|>assistant\n<think>\n\n</think>\n\n"],
        ["<think>", "</think>", "<tool_call>\n<function=get>\n", "<parameter=a>\n1\n</parameter>",
         "\n</function>\n</tool_call>", "<function=", "<|im_end|>"],
    ),
    "harmony": (
        HARMONY,
        ["<|start|>assistant"],
        ["<|channel|>analysis<|message|>", "<|end|>", "<|channel|>final<|message|>", "<|return|>",
         "<|channel|>commentary to=functions.get <|constrain|>json<|message|>", '{"a": 1}',
         "<|call|>", "<|start|>assistant"],
    ),
}  # fmt: skip
"""Templates with ends of prompts and pieces of answers."""
COMMON = ["Hello", " world", "\n\n", " x < y ", "é🙂", "{", "<|"]
