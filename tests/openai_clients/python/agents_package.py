"""openai-agents: an agent that calls a tool, by both of its APIs, whole and as a stream."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Annotated

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI
from pydantic import Field

CALLS: list[str] = []


@function_tool
def weather(city: Annotated[str, Field(max_length=20)]) -> str:
    """Tells the weather of a city."""
    CALLS.append(city)
    return "sunny, 21 degrees"


async def main() -> None:
    client = AsyncOpenAI(base_url=os.environ["BASE_URL"])
    done: dict[str, object] = {}
    for model in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        agent = Agent(
            name="weatherman",
            instructions="You tell the weather.",
            model=model(model=os.environ["MODEL"], openai_client=client),
            tools=[weather],
            # The first answer is a call; the package then lets the model choose.
            model_settings=ModelSettings(temperature=0, max_tokens=256, tool_choice="required"),
        )
        CALLS.clear()
        whole = await Runner.run(agent, "How is the weather in Paris?", max_turns=4)
        assert CALLS, whole
        assert isinstance(whole.final_output, str)
        calls = list(CALLS)
        streamed = Runner.run_streamed(agent, "How is the weather in Paris?", max_turns=4)
        events = [event.type async for event in streamed.stream_events()]
        assert streamed.final_output == whole.final_output
        assert [*calls, *calls] == CALLS
        done[model.__name__] = {"calls": calls, "said": whole.final_output, "events": len(events)}
    print(json.dumps(done))


if __name__ == "__main__":
    asyncio.run(main())
