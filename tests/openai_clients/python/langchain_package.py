"""langchain-openai: answers, streams, batches, structured answers and calls of tools."""

from __future__ import annotations

import json
import os

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    city: str
    country: str


@tool
def weather(city: str) -> str:
    """Tells the weather of a city."""
    return "sunny in " + city


def main() -> None:
    given = {"base_url": os.environ["BASE_URL"], "model": os.environ["MODEL"], "max_tokens": 48}
    model = ChatOpenAI(temperature=0, **given)
    question = "What is the capital of France?"
    whole = model.invoke(question)
    assert "Paris" in whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(part.content for part in model.stream(question)) == whole.content
    batch = model.batch([question, question, "Say hello."])
    assert batch[0].content == batch[1].content == whole.content
    parsed = model.with_structured_output(Answer).invoke(question)
    assert isinstance(parsed, Answer)
    (call,) = model.bind_tools([weather], tool_choice="weather").invoke(question).tool_calls
    assert call["name"] == "weather"
    assert isinstance(call["args"]["city"], str)
    text = OpenAI(temperature=0, **given).invoke("The capital of France is")
    assert text
    done = {"said": whole.content, "parsed": parsed.model_dump(), "call": call["args"]}
    print(json.dumps(done))


if __name__ == "__main__":
    main()
