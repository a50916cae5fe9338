"""Agents as programs have them, with two tools: `python sdk.py NAME TASK`, by OPENAI_BASE_URL and
MODEL. It runs in a virtual environment of that agent, without kvlite."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path


def read_file(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


def edit_file(path: str, old: str, new: str, times: int | None = None) -> str:
    """Replace a text in a file, everywhere or so many times."""
    file = Path(path)
    file.write_text(file.read_text().replace(old, new, -1 if times is None else times))
    return "edited"


MODEL, TOOLS = os.environ.get("MODEL", ""), [read_file, edit_file]


def pydantic_ai(task: str) -> str:
    """Chat completions, streamed."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    async def run() -> str:
        agent = Agent(OpenAIChatModel(MODEL), tools=TOOLS)
        async with agent.iter(task) as steps:
            async for node in steps:
                if agent.is_model_request_node(node):
                    async with node.stream(steps.ctx) as events:
                        async for _ in events:
                            pass
        return str(steps.result.output)

    return asyncio.run(run())


def openai_agents(task: str) -> str:
    """Responses, streamed."""
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)

    async def run() -> str:
        agent = Agent(name="editor", model=MODEL, tools=[*map(function_tool, TOOLS)])
        running = Runner.run_streamed(agent, task)
        async for _ in running.stream_events():
            pass
        return str(running.final_output)

    return asyncio.run(run())


def langgraph(task: str) -> str:
    """Chat completions, whole."""
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(model=MODEL), TOOLS)
    made = agent.invoke({"messages": [("user", task)]})
    return str(made["messages"][-1].content)


KINDS: dict[str, Callable[[str], str]] = {
    "pydantic-ai": pydantic_ai,
    "openai-agents": openai_agents,
    "langgraph": langgraph,
}

if __name__ == "__main__":
    print(KINDS[sys.argv[1]](sys.argv[2]))
