"""Runs in an environment with `google-adk`: an agent that transfers to another."""

import asyncio
import os

from google.adk.agents import LlmAgent
from google.adk.runners import InMemoryRunner
from google.genai import types


def invoice(number: int) -> dict:
    """Look up an invoice."""
    return {"number": number, "total": 30}


billing = LlmAgent(
    name="billing", model="gemini-m", description="Invoices.", instruction="You answer about invoices.", tools=[invoice]
)
root = LlmAgent(name="desk", model="gemini-m", instruction="You coordinate a help desk.", sub_agents=[billing])


async def main() -> None:
    runner = InMemoryRunner(agent=root, app_name="desk")
    session = await runner.session_service.create_session(app_name="desk", user_id="u")
    message = types.Content(role="user", parts=[types.Part(text=os.environ["INSTRUCTION"])])
    async for event in runner.run_async(user_id="u", session_id=session.id, new_message=message):
        print(event.author, event.content)


asyncio.run(main())
