"""Agents of several libraries, against the server at argv[1] with the key argv[2]; prints results as JSON lines."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

MOST_TURNS = 50
MOST_TOKENS = 300
USED: list[str] = []


class Verdict(BaseModel):
    """What every run ends with."""

    right: bool
    size: Literal["small", "large"]


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
    for kind, of in (("chat", OpenAIChatCompletionsModel), ("responses", OpenAIResponsesModel)):
        for choice in ("required", "auto"):
            # One call at a time: a model that knows no tools could add calls until its tokens are used up.
            settings = ModelSettings(
                tool_choice=choice, parallel_tool_calls=False, max_tokens=MOST_TOKENS, temperature=1.0
            )
            asked = {"tools": [function_tool(weather)], "output_type": Verdict, "model_settings": settings}
            agent: Any = Agent(name="a", instructions="Be brief.", model=of("demo", client), **asked)
            done = await Runner.run(agent, "Warm?", max_turns=MOST_TURNS)
            report(f"agents, {kind}, {choice}", done.final_output)
            streamed = Runner.run_streamed(agent, "Warm?", max_turns=MOST_TURNS)
            events = [event async for event in streamed.stream_events()]
            report(f"agents, {kind}, {choice}, streamed", streamed.final_output, len(events))


async def pydantic_ai(client: AsyncOpenAI) -> None:
    model = OpenAIChatModel("demo", provider=OpenAIProvider(openai_client=client))
    for name, output in (("native", NativeOutput(Verdict)), ("tool", Verdict)):
        agent: Any = PydanticAgent(model, output_type=output, model_settings={"max_tokens": MOST_TOKENS})
        agent.tool_plain(weather)
        report(f"pydantic_ai, {name}", (await agent.run("Warm?")).output)


async def langchain(client: AsyncOpenAI) -> None:
    given: Any = {"base_url": str(client.base_url), "api_key": client.api_key, "max_tokens": MOST_TOKENS}
    for api in (False, True):
        model = ChatOpenAI(model="demo", use_responses_api=api, **given)
        name = f"langchain, {'responses' if api else 'chat'}"
        for method in ("function_calling", "json_schema"):
            report(f"{name}, {method}", await model.with_structured_output(Verdict, method=method).ainvoke("Warm?"))
        calling = model.bind_tools([tool(weather)], tool_choice="required")
        turns: list[Any] = [HumanMessage("Warm?"), await calling.ainvoke("Warm?")]
        turns += [
            ToolMessage(tool(weather).invoke(call["args"]), tool_call_id=call["id"]) for call in turns[1].tool_calls
        ]
        report(f"{name}, required", await model.with_structured_output(Verdict, method="json_schema").ainvoke(turns))


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key=sys.argv[2], max_retries=0)
    for run in (openai_agents, pydantic_ai, langchain):
        await run(client)


asyncio.run(main())
