"""instructor: validated objects, by JSON schemas and by calls of tools."""

from __future__ import annotations

import json
import os

import instructor
import openai
from pydantic import BaseModel, Field


class Answer(BaseModel):
    city: str = Field(max_length=30)
    country: str = Field(max_length=30)


def main() -> None:
    done = {}
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
        client = instructor.from_openai(openai.OpenAI(base_url=os.environ["BASE_URL"]), mode=mode)
        answer = client.chat.completions.create(
            model=os.environ["MODEL"],
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            response_model=Answer,
            temperature=0,
            max_tokens=96,
            max_retries=0,
        )
        done[mode.name] = answer.model_dump()
    print(json.dumps(done))


if __name__ == "__main__":
    main()
