"""Runs in an environment with `smolagents` and `openai`: a code agent or a tool-calling agent that runs out of steps."""

import os
import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def list_files(folder: str) -> str:
    """List the files of a folder.

    Args:
        folder: The folder.
    """
    return f"{folder}: a.txt, b.txt"


model = OpenAIModel(model_id="m", api_base=os.environ["BASE"] + "/v1", api_key=os.environ["KEY"])
if sys.argv[1] == "code":
    agent = CodeAgent(tools=[], model=model, max_steps=3)
else:
    agent = ToolCallingAgent(tools=[list_files], model=model, max_steps=2)
print(agent.run(os.environ["INSTRUCTION"]))
