"""Every feature of an MCP server, once and in a few lines each.

The official conformance suite tests this server: `make conformance`.

    python examples/everything.py --port 8420        http://127.0.0.1:8420/mcp
    python examples/everything.py                    stdin and stdout

The suite calls the names that begin with `test`. The same functions serve all five revisions of
MCP: an answer leaves out the parts that a revision does not have, and a question to the user takes
the form that the revision knows.
"""

import argparse
import asyncio
import base64
from typing import Annotated, Any

from msgspec import Meta, Struct

from wirecall import App, Context, Header, ProtocolError, ToolAnnotations, ToolError
from wirecall.mcp import Audio, Embedded, Image, Message, ResourceLink, Text, ToolResult

app = App(
    "everything",
    version="1.0",
    instructions="One of each: tools, resources, prompts and questions to the user.",
    batch_tool="queries",  # a tool that calls several of the others in one request
)

# Hints for the client. Without them it must assume that a tool changes data, destroys data and
# calls other systems.
READS = ToolAnnotations(readOnlyHint=True, openWorldHint=False)
ASKS = ToolAnnotations(readOnlyHint=True, openWorldHint=True)  # it asks the user or a model
ANNOUNCES = ToolAnnotations(
    readOnlyHint=False, destructiveHint=False, idempotentHint=True, openWorldHint=False
)

RED_PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)
SILENCE = base64.b64decode(
    "UklGRiwAAABXQVZFZm10IBAAAAABAAEAQB8AAEAfAAABAAgAZGF0YQgAAACAgICAgICAgA=="
)


# --- results of a tool ----------------------------------------------------------------------------


@app.tool(annotations=READS)
def test_simple_text() -> str:
    """Return text."""
    return "This is a simple text response for testing."


@app.tool(annotations=READS)
def test_image_content() -> Image:
    """Return an image: one red pixel."""
    return Image(RED_PIXEL, "image/png")


@app.tool(annotations=READS)
def test_audio_content() -> Audio:
    """Return audio: a millisecond of silence."""
    return Audio(SILENCE, "audio/wav")


@app.tool(annotations=READS)
def test_embedded_resource() -> Embedded:
    """Return the content of a resource."""
    return Embedded(
        "test://embedded-resource",
        text="This is an embedded resource content.",
        mime_type="text/plain",
    )


@app.tool(annotations=READS)
def resource_link() -> ResourceLink:
    """Return a link to a resource, which the client can read."""
    return ResourceLink(
        "test://static-text",
        "static-text",
        mime_type="text/plain",
        title="Text that never changes",
    )


@app.tool(annotations=READS)
def test_multiple_content_types() -> list[Text | Image | Embedded]:
    """Return several types of content at once."""
    note = Embedded(
        "test://mixed-content-resource",
        text='{"test":"data","value":123}',
        mime_type="application/json",
    )
    return [Text("Multiple content types test:"), Image(RED_PIXEL, "image/png"), note]


class Weather(Struct):
    """The weather in a place."""

    place: str
    celsius: float
    signs: list[str]


@app.tool(annotations=READS)
def structured_output(place: Annotated[str, Meta(description="a city", min_length=1)]) -> Weather:
    """Return structured data; its schema comes from the type."""
    return Weather(place, 21.5, ["dry", "calm"])


@app.tool(annotations=READS)
def full_result(code: int = 7) -> ToolResult:
    """Return text for the model, and structured data for the program."""
    return ToolResult(
        content=[Text(f"The code is {code}.")],
        structured={"code": code},
        meta={"example.com/cost": 1},
    )


@app.tool(annotations=READS)
def test_error_handling() -> str:
    """Fail with an error that the model can read."""
    raise ToolError("This tool intentionally returns an error for testing")


# --- arguments of a tool --------------------------------------------------------------------------

CONTACT = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}


@app.tool(annotations=READS, input_schema=CONTACT)
def json_schema_2020_12_tool(**arguments: Any) -> str:
    """Take arguments with a schema that is written by hand."""
    return f"Arguments: {', '.join(sorted(arguments)) or 'none'}"


Region = Annotated[str, Meta(description="where to look"), Header("Region")]


@app.tool(annotations=READS)
def custom_header(region: Region, query: str = "all") -> str:
    """Take an argument that HTTP clients repeat in the header Mcp-Param-Region, so that a proxy can
    route by it.
    """
    return f"Looked for {query} in {region}"


# --- messages during a call -----------------------------------------------------------------------


@app.tool(annotations=READS)
async def test_tool_with_progress(ctx: Context) -> str:
    """Report progress: 0, 50 and 100 of 100."""
    for done in (0, 50, 100):
        await ctx.progress(done, total=100, message=f"Completed step {done} of 100")
        await asyncio.sleep(0.05)
    return "Progress is complete"


@app.tool(annotations=READS)
async def test_tool_with_logging(ctx: Context) -> str:
    """Send three log messages."""
    for message in ("Tool execution started", "Tool processing data", "Tool execution completed"):
        await ctx.log("info", message)
        await asyncio.sleep(0.05)
    return "Logged three messages"


@app.tool(annotations=READS)
async def test_logging_tool(ctx: Context) -> str:
    """Log data under a logger's name.

    At 2026-07-28 only a client that asks for log messages gets them.
    """
    await ctx.log("warning", {"disk": "nearly full", "left": 0.07}, logger="storage")
    return "Logged, for those who listen"


@app.tool(annotations=READS)
async def test_reconnection(ctx: Context) -> str:
    """Close the stream in the middle (2025-11-25): the client reconnects with Last-Event-ID and
    gets the answer.
    """
    await ctx.hang_up(retry=0.5)
    await asyncio.sleep(0.1)
    return "Reconnection test completed successfully"


# --- questions to the client ----------------------------------------------------------------------
# At 2026-07-28 the client repeats the call with the answers, and the function runs again from the
# top. So put every effect after the last question. `key` names a question in that exchange; older
# revisions do not use it.


class UserName(Struct):
    name: str


class Confirmation(Struct):
    ok: bool


@app.tool(annotations=ASKS)
async def test_sampling(prompt: str, ctx: Context) -> str:
    """Ask the client's model."""
    sampled = await ctx.sample(prompt, max_tokens=100)
    return f"LLM response: {sampled.text}"


@app.tool(annotations=ASKS)
async def test_elicitation(message: str, ctx: Context) -> str:
    """Ask the user to fill in a form with a schema that is written by hand."""
    fields = {
        "username": {"type": "string", "description": "User's response"},
        "email": {"type": "string", "format": "email"},
    }
    answer = await ctx.elicit(
        message, {"type": "object", "properties": fields, "required": ["username", "email"]}
    )
    return f"User response: action={answer.action}, content={answer.content}"


DEFAULTS = {
    "name": {"type": "string", "default": "John Doe"},
    "age": {"type": "integer", "default": 30},
    "score": {"type": "number", "default": 95.5},
    "status": {"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
    "verified": {"type": "boolean", "default": True},
}


@app.tool(annotations=ASKS)
async def test_elicitation_sep1034_defaults(ctx: Context) -> str:
    """Ask with a form that has default values."""
    answer = await ctx.elicit(
        "Please review your profile", {"type": "object", "properties": DEFAULTS}
    )
    return f"Elicitation completed: action={answer.action}, content={answer.content}"


NAMES = ["option1", "option2", "option3"]
TITLED = [{"const": f"value{number}", "title": f"Option {number}"} for number in (1, 2, 3)]
CHOICES = {
    "untitledSingle": {"type": "string", "enum": NAMES},
    "titledSingle": {"type": "string", "oneOf": TITLED},
    "legacyEnum": {
        "type": "string",
        "enum": ["opt1", "opt2", "opt3"],
        "enumNames": ["Option 1", "Option 2", "Option 3"],
    },
    "untitledMulti": {"type": "array", "items": {"type": "string", "enum": NAMES}},
    "titledMulti": {"type": "array", "items": {"anyOf": TITLED}},
}


@app.tool(annotations=ASKS)
async def test_elicitation_sep1330_enums(ctx: Context) -> str:
    """Ask with every type of choice."""
    answer = await ctx.elicit("Please choose", {"type": "object", "properties": CHOICES})
    return f"Elicitation completed: action={answer.action}, content={answer.content}"


@app.tool(annotations=ASKS)
async def test_input_required_result_elicitation(ctx: Context) -> str:
    """Ask with a form made from a type; the answer is of that type."""
    answer = await ctx.elicit("What is your name?", UserName, key="user_name")
    return (
        f"Hello, {answer.content.name}!"
        if answer.action == "accept"
        else f"No name: {answer.action}"
    )


@app.tool(annotations=ASKS)
async def test_input_required_result_sampling(ctx: Context) -> str:
    """Ask the model, with a key for the question."""
    sampled = await ctx.sample(
        "What is the capital of France?", max_tokens=100, key="capital_question"
    )
    return f"The model says: {sampled.text}"


@app.tool(annotations=ASKS)
async def test_input_required_result_list_roots(ctx: Context) -> str:
    """Ask for the folders that the client works in."""
    roots = await ctx.roots(key="client_roots")
    return f"Roots: {', '.join(root.uri for root in roots) or 'none'}"


@app.tool(annotations=ASKS)
async def test_input_required_result_multiple_inputs(ctx: Context) -> str:
    """Ask the user, the model and the client at once."""
    user, greeting, roots = await ctx.ask(
        ctx.elicit("What is your name?", UserName, key="user_name"),
        ctx.sample("Generate a greeting", max_tokens=50, key="greeting"),
        ctx.roots(key="client_roots"),
    )
    return f"{user.action}: {greeting.text} ({len(roots)} roots)"


@app.tool(annotations=ASKS)
async def test_input_required_result_multi_round(ctx: Context) -> str:
    """Ask a second question that depends on the first answer."""
    first = await ctx.elicit("Step 1: What is your name?", UserName, key="step1")
    name = first.content.name if first.action == "accept" else "stranger"
    colour = {"type": "object", "properties": {"color": {"type": "string"}}, "required": ["color"]}
    second = await ctx.elicit(
        f"Step 2: What is your favourite colour, {name}?", colour, key="step2"
    )
    return (
        f"{name} likes {second.content['color']}"
        if second.action == "accept"
        else f"{name} did not say"
    )


@app.tool(annotations=ASKS)
async def test_input_required_result_request_state(ctx: Context) -> str:
    """Ask, and continue with the state that the client sends back."""
    answer = await ctx.elicit("Please confirm", Confirmation, key="confirm")
    return f"state-ok: {answer.action}"


@app.tool(annotations=ASKS)
async def test_input_required_result_tampered_state(ctx: Context) -> str:
    """Ask; the server refuses a modified state before this function runs."""
    answer = await ctx.elicit("Please confirm", Confirmation, key="confirm")
    return f"Confirmed: {answer.action}"


@app.tool(annotations=ASKS)
async def test_input_required_result_capabilities(ctx: Context) -> str:
    """Ask a question that this client can answer."""
    if "sampling" in ctx.client_capabilities:
        return (await ctx.sample("Say hello", max_tokens=20, key="hello")).text
    return (await ctx.elicit("Please confirm", Confirmation, key="confirm")).action


@app.tool(annotations=ASKS)
async def test_missing_capability(ctx: Context) -> str:
    """Ask the client's model; a client without one gets an error that names the missing capability."""
    return (await ctx.sample("Say hello", max_tokens=20)).text


@app.tool(annotations=ASKS)
async def test_streaming_elicitation(ctx: Context) -> str:
    """Report progress, then ask."""
    await ctx.progress(1, total=2, message="about to ask")
    answer = await ctx.elicit("Shall we continue?", Confirmation)
    return f"Answered: {answer.action}"


# --- tasks: calls that continue after their request (2026-07-28) ----------------------------------


@app.tool(annotations=READS)
def greet(name: str) -> str:
    """Return a greeting: a tool that does not become a task."""
    return f"Hello, {name}!"


@app.tool(annotations=READS, task=True)
async def slow_compute(seconds: float, ctx: Context, label: str = "compute") -> str:
    """Work for some seconds. A client without tasks waits for the result."""
    await ctx.progress(0, seconds, f"{label} began")
    await asyncio.sleep(seconds)
    return f"{label} took {seconds:g} s"


@app.tool(annotations=READS, task="required")
async def failing_job() -> str:
    """Fail after a second: the task completes with an error that the model reads."""
    await asyncio.sleep(1)
    raise ToolError("the job failed")


@app.tool(annotations=READS, task=True)
async def protocol_error_job() -> str:
    """End with an error of JSON-RPC: the task fails."""
    raise ProtocolError(-32603, "the job broke")


class Deletion(Struct):
    confirm: bool


@app.tool(annotations=ASKS, task=True)
async def confirm_delete(filename: str, ctx: Context) -> str:
    """Ask the user inside a task."""
    answer = await ctx.elicit(f"Delete {filename}?", Deletion)
    confirmed = answer.action == "accept" and answer.content.confirm
    return f"{filename}: {'deleted' if confirmed else 'kept'}"


@app.tool(annotations=ASKS, task=True)
async def multi_input(ctx: Context) -> str:
    """Ask two questions at once inside a task."""
    answers = await ctx.ask(ctx.elicit("Your name?", UserName), ctx.elicit("Continue?", Deletion))
    return ", ".join(answer.action for answer in answers)


@app.tool(annotations=ASKS, task="required")
async def test_tool_with_task(ctx: Context) -> str:
    """Ask within the request, then continue as a task."""
    answer = await ctx.elicit("What is your name?", UserName)
    await ctx.hand_over()
    await asyncio.sleep(0.1)
    return f"Hello, {answer.content.name if answer.action == 'accept' else 'stranger'}!"


# --- notifications of changes ---------------------------------------------------------------------


@app.tool(annotations=ANNOUNCES)
def test_trigger_tool_change() -> str:
    """Tell subscribers that the list of tools changed."""
    app.changed("tools")
    return "Notified: the tools changed"


@app.tool(annotations=ANNOUNCES)
def test_trigger_prompt_change() -> str:
    """Tell subscribers that the list of prompts changed."""
    app.changed("prompts")
    return "Notified: the prompts changed"


@app.tool(annotations=ANNOUNCES)
def trigger_resource_update() -> str:
    """Tell subscribers that the watched resource has new content."""
    app.updated("test://watched-resource")
    return "Notified: the resource changed"


# --- resources ------------------------------------------------------------------------------------


@app.resource(
    "test://static-text",
    name="static-text",
    title="Text that never changes",
    mime_type="text/plain",
)
def static_text() -> str:
    """Plain text."""
    return "This is the content of the static text resource."


@app.resource("test://static-binary", name="static-binary", mime_type="image/png")
def static_binary() -> bytes:
    """Bytes: the same red pixel."""
    return RED_PIXEL


@app.resource("test://watched-resource", name="watched-resource", mime_type="text/plain")
def watched_resource() -> str:
    """Text to subscribe to; trigger_resource_update reports that it changed."""
    return "Watched resource content"


@app.resource("test://template/{id}/data", name="template", mime_type="application/json")
def template(id: str) -> str:
    """A resource for every id."""
    return f'{{"id":"{id}","templateTest":true,"data":"Data for ID: {id}"}}'


# --- prompts and completion -----------------------------------------------------------------------


@app.prompt
def test_simple_prompt() -> str:
    """A prompt without arguments."""
    return "This is a simple prompt for testing."


@app.prompt(title="A prompt with two arguments")
def test_prompt_with_arguments(
    arg1: Annotated[str, Meta(description="the first one")],
    arg2: Annotated[str, Meta(description="the second one")],
) -> str:
    """A prompt with arguments."""
    return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"


@app.prompt
def test_prompt_with_embedded_resource(resourceUri: str) -> list[Message]:  # noqa: N803 - the suite sends this name
    """A prompt with an embedded resource."""
    resource = Embedded(
        resourceUri, text="Embedded resource content for testing.", mime_type="text/plain"
    )
    return [
        Message("user", resource),
        Message("user", "Please process the embedded resource above."),
    ]


@app.prompt
def test_prompt_with_image() -> list[Message]:
    """A prompt with an image."""
    return [
        Message("user", Image(RED_PIXEL, "image/png")),
        Message("user", "Please analyze the image above."),
    ]


@app.prompt
async def test_input_required_result_prompt(ctx: Context) -> str:
    """A prompt that first asks the user a question."""
    topic = {
        "type": "object",
        "properties": {"context": {"type": "string"}},
        "required": ["context"],
    }
    answer = await ctx.elicit("What context should the prompt use?", topic, key="user_context")
    return (
        f"Use this context: {answer.content['context']}"
        if answer.action == "accept"
        else "Use no context."
    )


WORDS = ["paris", "park", "party", "pasta"]


@app.completion("test_prompt_with_arguments", "arg1")
def complete_arg1(value: str) -> list[str]:
    """Return the words that start with the text typed so far."""
    return [word for word in WORDS if word.startswith(value)]


@app.completion("test://template/{id}/data", "id")
def complete_id(value: str) -> list[str]:
    """Return the ids that start with the text typed so far."""
    return [id for id in ("1", "12", "123") if id.startswith(value)]


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="An MCP server with one of everything.")
    options.add_argument(
        "--port",
        type=int,
        help="serve HTTP on 127.0.0.1; without it, serve standard input and output",
    )
    port = options.parse_args().port
    if port is None:
        app.run("stdio")
    else:
        app.run("http", host="127.0.0.1", port=port)
