"""litellm: one mesh under its names `openai/` and `text-completion-openai/`."""

from __future__ import annotations

import asyncio
import json
import os

import litellm

TALK = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}


async def main() -> None:
    model = os.environ["MODEL"]
    given = {"api_base": os.environ["BASE_URL"], "temperature": 0, "max_tokens": 48}
    chat = {"model": f"openai/{model}", "messages": TALK, **given}
    whole = litellm.completion(**chat)
    text = whole.choices[0].message.content
    assert "Paris" in text
    parts = litellm.completion(stream=True, **chat)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    many = await asyncio.gather(*(litellm.acompletion(**chat) for _ in range(8)))
    assert {each.choices[0].message.content for each in many} == {text}
    called = litellm.completion(tools=[WEATHER], tool_choice="required", **chat)
    (call,) = called.choices[0].message.tool_calls
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    plain = litellm.text_completion(
        model=f"text-completion-openai/{model}", prompt="The capital of France is", **given
    )
    assert plain.choices[0].text
    try:
        litellm.completion(**{**chat, "model": "openai/absent"})
    except litellm.NotFoundError as error:
        status = error.status_code
    print(json.dumps({"said": text, "call": call.function.arguments, "absent": status}))


if __name__ == "__main__":
    asyncio.run(main())
