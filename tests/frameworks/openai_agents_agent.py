"""An agent of the OpenAI Agents SDK, whose own retries of tool calls are on."""

import json
from importlib import import_module
from typing import Any

from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

from tests.frameworks.shopper import PATIENCE, Answer, Shopping, shop

# Not by `import`: examples/agents.py has the same name, and type checkers would take that one.
sdk: Any = import_module("agents")
mcp: Any = import_module("agents.mcp")


class Shopper(sdk.Model):
    def __init__(self, shopping: Shopping) -> None:
        self.shopping = shopping

    async def get_response(
        self, system_instructions: Any, input: Any, *_: Any, **options: Any
    ) -> Any:
        names: dict[str, str] = {}
        answers = []
        for item in [] if isinstance(input, str) else input:
            if item.get("type") == "function_call":
                names[item["call_id"]] = item["name"]
            elif item.get("type") == "function_call_output":
                text = (
                    item["output"]
                    if isinstance(item["output"], str)
                    else json.dumps(item["output"])
                )
                answers.append(Answer(names[item["call_id"]], "error occurred" in text, text))
        call = self.shopping.next_call(answers)
        output: Any
        if call is None:
            text_part = ResponseOutputText(annotations=[], text="done", type="output_text")
            output = ResponseOutputMessage(
                id="message",
                content=[text_part],
                role="assistant",
                status="completed",
                type="message",
            )
        else:
            tool, arguments = call
            output = ResponseFunctionToolCall(
                arguments=json.dumps(arguments),
                call_id=f"call-{len(answers)}",
                name=tool,
                type="function_call",
            )
        return sdk.ModelResponse(output=[output], usage=sdk.Usage(), response_id=None)

    def stream_response(self, *_: Any, **options: Any) -> Any:
        raise NotImplementedError


async def agent(shopping: Shopping) -> None:
    server = mcp.MCPServerStreamableHttp(
        params={"url": shopping.url},
        # Else the SDK lists them on the cut session, and fails although its retry succeeded.
        cache_tools_list=True,
        max_retry_attempts=3,
        retry_backoff_seconds_base=0.1,
        client_session_timeout_seconds=PATIENCE,
    )
    async with server:
        shopper = sdk.Agent(name="shopper", model=Shopper(shopping), mcp_servers=[server])
        await sdk.Runner.run(shopper, "buy tea", run_config=sdk.RunConfig(tracing_disabled=True))


if __name__ == "__main__":
    shop(agent)
