"""Runs in an environment with `deepagents` and `langchain-openai`: two sub-agents at the same time."""

import os

from deepagents import create_deep_agent
from langchain_openai import ChatOpenAI


def weather(city: str) -> str:
    """What the weather in a city is."""
    return f"{city}: rain"


model = ChatOpenAI(model="m", base_url=os.environ["BASE"] + "/v1", api_key=os.environ["KEY"])
researcher = {
    "name": "researcher",
    "description": "Finds things out.",
    "system_prompt": "You research one question.",
    "tools": [weather],
}
agent = create_deep_agent(model=model, tools=[], system_prompt="You plan and delegate.", subagents=[researcher])
result = agent.invoke({"messages": [{"role": "user", "content": os.environ["INSTRUCTION"]}]})
print(result["messages"][-1].content)
