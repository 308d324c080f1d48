"""Agents of two libraries, run against the server at argv[1] with the key argv[2]; prints what came as JSON lines."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

MOST_TURNS = 50
USED: list[str] = []


class Verdict(BaseModel):
    """What every run ends with."""

    right: bool
    size: Literal["small", "large"]


@function_tool
def weather(city: Literal["Bern", "Oslo"]) -> str:
    """Tell the weather of a city."""
    USED.append(city)
    return "warm"


def report(name: str, output: Any, events: int = 0) -> None:
    line = {"name": name, "output": output.model_dump(), "used": list(USED), "events": events}
    sys.stdout.write(json.dumps(line) + "\n")
    USED.clear()


async def openai_agents(client: AsyncOpenAI) -> None:
    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel("demo", client)
    for choice in ("required", "auto"):
        settings = ModelSettings(tool_choice=choice, max_tokens=300, temperature=1.0)
        asked = {"tools": [weather], "output_type": Verdict, "model": model, "model_settings": settings}
        agent: Any = Agent(name="a", instructions="Be brief.", **asked)
        done = await Runner.run(agent, "Warm?", max_turns=MOST_TURNS)
        report(f"agents {choice}", done.final_output)
        streamed = Runner.run_streamed(agent, "Warm?", max_turns=MOST_TURNS)
        events = [event async for event in streamed.stream_events()]
        report(f"agents {choice}, streamed", streamed.final_output, len(events))


async def pydantic_ai(client: AsyncOpenAI) -> None:
    model = OpenAIChatModel("demo", provider=OpenAIProvider(openai_client=client))
    for name, output in (("native", NativeOutput(Verdict)), ("tool", Verdict)):
        agent: Any = PydanticAgent(model, output_type=output, model_settings={"max_tokens": 300})

        @agent.tool_plain
        def temperature(city: Literal["Bern", "Oslo"]) -> str:
            """Tell the temperature of a city."""
            USED.append(city)
            return "20"

        report(f"pydantic_ai {name}", (await agent.run("Warm?")).output)


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key=sys.argv[2])
    await openai_agents(client)
    await pydantic_ai(client)


asyncio.run(main())
