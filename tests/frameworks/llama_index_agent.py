"""An agent of LlamaIndex. Its MCP client opens a session for each tool call."""

from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, MessageRole, ToolCallBlock
from llama_index.core.llms.mock import MockFunctionCallingLLM
from llama_index.tools.mcp import BasicMCPClient, McpToolSpec

from tests.frameworks.shopper import PATIENCE, Answer, Shopping, shop


async def agent(shopping: Shopping) -> None:
    def decide(messages: Any, **_: Any) -> Any:
        names: dict[str, str] = {}
        answers = []
        for message in messages:
            for block in message.blocks:
                if isinstance(block, ToolCallBlock):
                    names[block.tool_call_id or ""] = block.tool_name
            if message.role == MessageRole.TOOL:
                text = message.content or ""
                # The model sees only the message of an exception.
                is_error = "is_error=False" not in text
                answers.append(
                    Answer(names[message.additional_kwargs["tool_call_id"]], is_error, text)
                )
        call = shopping.next_call(answers)
        if call is None:
            return ChatMessage(role="assistant", content="done")
        tool, arguments = call
        block = ToolCallBlock(
            tool_call_id=f"call-{len(answers)}", tool_name=tool, tool_kwargs=arguments
        )
        return ChatMessage(role="assistant", blocks=[block])

    client = BasicMCPClient(shopping.url, timeout=int(PATIENCE), sse_read_timeout=int(PATIENCE))
    tools = await McpToolSpec(client).to_tool_list_async()
    llm = MockFunctionCallingLLM(response_generator=decide, is_chat_model=True)
    await FunctionAgent(tools=tools, llm=llm).run("buy tea")


if __name__ == "__main__":
    shop(agent)
