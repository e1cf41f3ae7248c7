// The official client for TypeScript, 1.x or 2.x, runs the story of test_foreign_clients.py at each revision and
// prints what it saw as one line of JSON each. Its only argument:
//
//     {"modules": ".../node_modules", "sdk": 1, "revisions": ["2025-11-25"], "url": "http://127.0.0.1:8420/mcp"}
//     {"modules": ".../node_modules", "sdk": 2, "revisions": ["2026-07-28"], "command": ["python", "examples/everything.py"]}

import { createRequire } from "node:module";
import { join } from "node:path";

const wanted = JSON.parse(process.argv[2]);
let offered, negotiated;
const load = createRequire(join(wanted.modules, "here.js"));

const ANSWERS = {
  "sampling/createMessage": () => ({ model: "m", role: "assistant", content: { type: "text", text: "42" } }),
  "elicitation/create": (request) => {
    const fields = Object.keys(request.params.requestedSchema.properties);
    return { action: "accept", content: Object.fromEntries(fields.map((field) => [field, "Ann"])) };
  },
  "roots/list": () => ({ roots: [{ uri: "file:///project", name: "project" }] }),
};

const SDKS = { 1: first, 2: second };

function first() {
  const { Client } = load("@modelcontextprotocol/sdk/client/index.js");
  const types = load("@modelcontextprotocol/sdk/types.js");
  const client = new Client({ name: "story", version: "1" }, { capabilities: CAPABILITIES });
  client.setRequestHandler(types.CreateMessageRequestSchema, ANSWERS["sampling/createMessage"]);
  client.setRequestHandler(types.ElicitRequestSchema, ANSWERS["elicitation/create"]);
  client.setRequestHandler(types.ListRootsRequestSchema, ANSWERS["roots/list"]);
  const http = load("@modelcontextprotocol/sdk/client/streamableHttp.js");
  const stdio = load("@modelcontextprotocol/sdk/client/stdio.js");
  const call = (params, options) => client.callTool(params, undefined, options);
  return { client, call, transport: transport(http.StreamableHTTPClientTransport, stdio.StdioClientTransport) };
}

function second() {
  const http = load("@modelcontextprotocol/client");
  const mode = offered === "2026-07-28" ? "auto" : "legacy";
  const options = { capabilities: CAPABILITIES, versionNegotiation: { mode } };
  const client = new http.Client({ name: "story", version: "1" }, options);
  for (const [method, answer] of Object.entries(ANSWERS)) client.setRequestHandler(method, answer);
  const stdio = load("@modelcontextprotocol/client/stdio");
  const call = (params, options) => client.callTool(params, options);
  return { client, call, transport: transport(http.StreamableHTTPClientTransport, stdio.StdioClientTransport) };
}

const CAPABILITIES = { sampling: {}, elicitation: {}, roots: {} };

function transport(Http, Stdio) {
  const [command, ...args] = wanted.command ?? [];
  const made = wanted.url ? new Http(new URL(wanted.url)) : new Stdio({ command, args, stderr: "inherit" });
  const send = made.send.bind(made);
  // The clients always offer their newest revision of the handshake; this makes them offer another one.
  made.send = (message, options) => {
    const offers = message.method === "initialize";
    return send(offers ? { ...message, params: { ...message.params, protocolVersion: offered } } : message, options);
  };
  // Called with the result of the handshake, if there was one.
  const set = made.setProtocolVersion?.bind(made);
  made.setProtocolVersion = (revision) => {
    negotiated = revision;
    set?.(revision);
  };
  return made;
}

async function story({ client, call }) {
  const tool = async (name, args = {}, options = undefined) => {
    const result = await call({ name, arguments: args }, options);
    return [Boolean(result.isError), result.content[0].text];
  };
  const kind = async (name) => (await call({ name, arguments: {} })).content[0].type;
  const tools = (await client.listTools()).tools.map((tool) => tool.name);
  const progress = [];
  const onprogress = (step) => progress.push([step.progress, step.total]);
  const structured = await call({ name: "structured_output", arguments: { place: "Paris" } });
  const prompt = await client.getPrompt({ name: "test_prompt_with_arguments", arguments: { arg1: "a", arg2: "b" } });
  const ref = { type: "ref/prompt", name: "test_prompt_with_arguments" };
  return {
    revision: negotiated ?? client.getNegotiatedProtocolVersion(),
    server: client.getServerVersion().name,
    first_tool: tools[0],
    text: await tool("test_simple_text"),
    structured: structured.structuredContent ?? null,
    structured_text: JSON.parse(structured.content[0].text),
    audio: await kind("test_audio_content"),
    link: await kind("resource_link"),
    failed: await tool("test_error_handling"),
    header: await tool("custom_header", { region: "north" }),
    resource: (await client.readResource({ uri: "test://static-text" })).contents[0].text,
    template: JSON.parse((await client.readResource({ uri: "test://template/7/data" })).contents[0].text).id,
    prompt: prompt.messages[0].content.text,
    completion: (await client.complete({ ref, argument: { name: "arg1", value: "par" } })).completion.values,
    progressed: await tool("test_tool_with_progress", {}, { onprogress }),
    progress,
    reconnected: await tool("test_reconnection"),
    sampled: await tool("test_sampling", { prompt: "?" }),
    elicited: await tool("test_input_required_result_elicitation"),
    two_rounds: await tool("test_input_required_result_multi_round"),
    roots: await tool("test_input_required_result_list_roots"),
    batch: await batch(tool, wanted.batch),
    batch_asked: await batch(tool, wanted.batch_asked),
    unknown_resource: await client.readResource({ uri: "test://nothing" }).catch((error) => error.code),
  };
}

async function batch(tool, calls) {
  const [failed, text] = await tool("batch", calls);
  return [failed, JSON.parse(text).results];
}

for (offered of wanted.revisions) {
  negotiated = undefined;
  const sdk = SDKS[wanted.sdk]();
  await sdk.client.connect(sdk.transport);
  console.log(JSON.stringify(await story(sdk)));
  await sdk.client.close();
}
