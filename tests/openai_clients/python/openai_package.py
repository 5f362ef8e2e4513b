"""openai for Python: completions, conversations, streams, structured answers, errors."""

from __future__ import annotations

import asyncio
import json
import os

import openai
from pydantic import BaseModel

MODEL = os.environ["MODEL"]
TALK = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


class Answer(BaseModel):
    city: str
    country: str


def chats(client: openai.OpenAI) -> str:
    whole = client.chat.completions.create(
        model=MODEL, messages=TALK, temperature=0, max_tokens=40, logprobs=True, top_logprobs=3
    )
    (choice,) = whole.choices
    text = choice.message.content
    assert "Paris" in (text or ""), text
    assert choice.finish_reason == "stop"
    assert choice.logprobs
    parts = client.chat.completions.create(
        model=MODEL,
        messages=TALK,
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces, usage = [], None
    for part in parts:
        pieces += [choice.delta.content or "" for choice in part.choices]
        usage = part.usage or usage
    assert "".join(pieces) == text
    assert usage
    assert usage.completion_tokens == whole.usage.completion_tokens
    return text


def helpers(client: openai.OpenAI) -> Answer:
    with client.chat.completions.stream(
        model=MODEL, messages=TALK, temperature=0, max_tokens=60, response_format=Answer
    ) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0].message.parsed
    parsed = client.chat.completions.parse(
        model=MODEL, messages=TALK, temperature=0, max_tokens=60, response_format=Answer
    )
    answer = parsed.choices[0].message.parsed
    assert answer
    assert answer == streamed
    return answer


def completions(client: openai.OpenAI) -> int:
    prompts = ["The capital of France is", "One, two, three,"]
    whole = client.completions.create(model=MODEL, prompt=prompts, n=2, max_tokens=5, seed=1)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts = dict.fromkeys(range(4), "")
    parts = client.completions.create(
        model=MODEL, prompt=prompts, n=2, max_tokens=5, seed=1, stream=True
    )
    for part in parts:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    return len(texts)


def errors(client: openai.OpenAI) -> list[str]:
    seen = []
    for changed, expected in (
        ({"model": "absent"}, openai.NotFoundError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"max_tokens": 10**6, "messages": TALK * 2000}, openai.BadRequestError),
        ({"extra_body": {"no_such_field": 1}}, openai.BadRequestError),
    ):
        given = {"model": MODEL, "messages": TALK, "max_tokens": 1, **changed}
        try:
            client.chat.completions.create(**given)
        except expected as error:
            seen.append(f"{error.request_id and error.code}")
    assert len(seen) == 4, seen
    assert "None" not in seen, seen
    return seen


async def at_once(client: openai.AsyncOpenAI) -> int:
    """Twenty streams, of which every second is left after two parts."""

    async def one(place: int) -> int:
        parts = await client.chat.completions.create(
            model=MODEL, messages=TALK, max_tokens=20, seed=place, stream=True
        )
        got = 0
        async with parts:
            async for _ in parts:
                got += 1
                if place % 2 and got == 2:
                    break
        return got

    return sum(await asyncio.gather(*(one(place) for place in range(20))))


def main() -> None:
    address = os.environ["BASE_URL"]
    client = openai.OpenAI(base_url=address)
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL
    done = {
        "chat": chats(client),
        "parsed": helpers(client).model_dump(),
        "choices": completions(client),
        "errors": errors(client),
        "parts": asyncio.run(at_once(openai.AsyncOpenAI(base_url=address))),
    }
    print(json.dumps(done))


if __name__ == "__main__":
    main()
