"""An agent of LangChain. Its MCP adapter opens a session for each tool call."""

from datetime import timedelta
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_mcp_adapters.client import MultiServerMCPClient

from tests.frameworks.shopper import PATIENCE, Answer, Shopping, shop


class Model(BaseChatModel):
    shopping: Any

    @property
    def _llm_type(self) -> str:
        return "shopper"

    def bind_tools(self, tools: Any, **options: Any) -> "Model":
        return self

    def _generate(self, messages: list[Any], *_: Any, **options: Any) -> Any:
        tools = [message for message in messages if isinstance(message, ToolMessage)]
        answers = [
            Answer(each.name or "", each.status == "error", str(each.content)) for each in tools
        ]
        call = self.shopping.next_call(answers)
        message = AIMessage(content="done")
        if call is not None:
            tool, arguments = call
            message = AIMessage(
                content="",
                tool_calls=[{"name": tool, "args": arguments, "id": f"call-{len(messages)}"}],
            )
        return ChatResult(generations=[ChatGeneration(message=message)])


async def agent(shopping: Shopping) -> None:
    server = {
        "transport": "streamable_http",
        "url": shopping.url,
        "session_kwargs": {"read_timeout_seconds": timedelta(seconds=PATIENCE)},
    }
    tools = await MultiServerMCPClient({"shop": server}).get_tools()
    await create_agent(Model(shopping=shopping), tools).ainvoke({"messages": [("user", "buy tea")]})


if __name__ == "__main__":
    shop(agent)
