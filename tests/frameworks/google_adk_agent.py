"""An agent of Google's Agent Development Kit, whose toolset retries a call once when its session
has ended.
"""

from collections.abc import AsyncGenerator
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.models import BaseLlm, LlmResponse
from google.adk.runners import InMemoryRunner
from google.adk.tools.mcp_tool import McpToolset, StreamableHTTPConnectionParams
from google.genai import types

from tests.frameworks.shopper import PATIENCE, Answer, Shopping, shop


class Model(BaseLlm):
    shopping: Any

    async def generate_content_async(
        self, llm_request: Any, stream: bool = False
    ) -> AsyncGenerator[Any, None]:
        answers = []
        for content in llm_request.contents:
            for part in content.parts or ():
                given = part.function_response
                if given is not None:
                    is_error = "error" in given.response or bool(given.response.get("isError"))
                    answers.append(Answer(given.name, is_error, str(given.response)))
        call = self.shopping.next_call(answers)
        part = types.Part(text="done")
        if call is not None:
            tool, arguments = call
            part = types.Part(function_call=types.FunctionCall(name=tool, args=arguments))
        yield LlmResponse(content=types.Content(role="model", parts=[part]))


async def agent(shopping: Shopping) -> None:
    tools = McpToolset(
        connection_params=StreamableHTTPConnectionParams(
            url=shopping.url, timeout=PATIENCE, sse_read_timeout=PATIENCE
        )
    )
    shopper = LlmAgent(
        name="shopper", model=Model(model="shopper", shopping=shopping), tools=[tools]
    )
    runner = InMemoryRunner(agent=shopper, app_name="shop")
    session = await runner.session_service.create_session(app_name="shop", user_id="user")
    message = types.Content(role="user", parts=[types.Part(text="buy tea")])
    try:
        async for _ in runner.run_async(user_id="user", session_id=session.id, new_message=message):
            pass
    finally:
        await tools.close()


if __name__ == "__main__":
    shop(agent)
