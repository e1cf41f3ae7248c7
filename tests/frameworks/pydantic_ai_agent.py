"""An agent of Pydantic AI.

It has one session for a run, and gives a failed tool call back to the model.
"""

from typing import Any

from pydantic_ai import Agent
from pydantic_ai.mcp import MCPToolset
from pydantic_ai.messages import (
    ModelResponse,
    RetryPromptPart,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
)
from pydantic_ai.models.function import FunctionModel

from tests.frameworks.shopper import PATIENCE, Answer, Shopping, shop


async def agent(shopping: Shopping) -> None:
    def decide(messages: list[Any], _info: Any) -> Any:
        answers = []
        for message in messages:
            for part in message.parts:
                if isinstance(part, ToolReturnPart):
                    answers.append(Answer(part.tool_name, False, part.model_response_str()))
                elif isinstance(part, RetryPromptPart):
                    answers.append(Answer(part.tool_name or "", True, part.model_response()))
        call = shopping.next_call(answers)
        if call is None:
            return ModelResponse(parts=[TextPart("done")])
        return ModelResponse(parts=[ToolCallPart(*call)])

    tools = MCPToolset(shopping.url, max_retries=3, read_timeout=PATIENCE)
    await Agent(FunctionModel(decide), toolsets=[tools]).run("buy tea")


if __name__ == "__main__":
    shop(agent)
