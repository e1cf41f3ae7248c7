// A server of the official SDK for TypeScript, 1.x or 2.x, for our client to talk to. Its only argument:
//
//     {"modules": ".../node_modules", "sdk": 1, "port": 8420}      http://127.0.0.1:8420/mcp
//     {"modules": ".../node_modules", "sdk": 2}                    stdin and stdout

import { createServer } from "node:http";
import { createRequire } from "node:module";
import { randomUUID } from "node:crypto";
import { join } from "node:path";

const wanted = JSON.parse(process.argv[2]);
const load = createRequire(join(wanted.modules, "here.js"));
const { z } = load("zod");

const text = (said) => ({ content: [{ type: "text", text: said }] });
const hello = (answer) => text(answer.action === "accept" ? `Hello, ${answer.content.name}` : "Hello, whoever");
const NAME = { type: "object", properties: { name: { type: "string" } }, required: ["name"] };

// What both generations offer; `ask` is how a tool asks for a name, `tell` how it sends a notification.
function offer(server, ResourceTemplate, ask, tell) {
  server.registerTool(
    "add",
    {
      inputSchema: z.object({ a: z.number(), b: z.number() }),
      outputSchema: z.object({ result: z.number() }),
      annotations: { readOnlyHint: true },
    },
    ({ a, b }) => ({ ...text(String(a + b)), structuredContent: { result: a + b } }),
  );
  const fails = { inputSchema: z.object({ what: z.string() }), annotations: { destructiveHint: true } };
  server.registerTool("fail", fails, ({ what }) => {
    throw new Error(`${what} does not work`);
  });
  server.registerTool("steps", {}, async (context) => {
    const [progressToken, send] = tell(context);
    for (const progress of progressToken === undefined ? [] : [1, 2]) {
      const params = { progressToken, progress, total: 2, message: `step ${progress}` };
      await send({ method: "notifications/progress", params });
    }
    return text("both steps");
  });
  server.registerTool("hello", {}, (context) => ask(server, context));
  server.registerResource("note", new ResourceTemplate("note://{id}", { list: undefined }), {}, (uri, { id }) => ({
    contents: [{ uri: uri.href, text: `note ${id}` }],
  }));
  server.registerPrompt("greet", { argsSchema: wanted.sdk === 1 ? { who: z.string() } : z.object({ who: z.string() }) }, ({ who }) => ({
    messages: [{ role: "user", content: { type: "text", text: `Say hello to ${who}` } }],
  }));
  return server;
}

const IDENTITY = [{ name: "strange", version: "1" }, { capabilities: { logging: {} } }];

function first() {
  const { McpServer, ResourceTemplate } = load("@modelcontextprotocol/sdk/server/mcp.js");
  const { StreamableHTTPServerTransport } = load("@modelcontextprotocol/sdk/server/streamableHttp.js");
  const { StdioServerTransport } = load("@modelcontextprotocol/sdk/server/stdio.js");
  const ask = async ({ server }) => hello(await server.elicitInput({ message: "Who are you?", requestedSchema: NAME }));
  const tell = (extra) => [extra._meta?.progressToken, extra.sendNotification];
  const made = () => offer(new McpServer(...IDENTITY), ResourceTemplate, ask, tell);
  const sessions = new Map();
  const opened = async () => {
    const transport = new StreamableHTTPServerTransport({
      sessionIdGenerator: randomUUID,
      onsessioninitialized: (id) => sessions.set(id, transport),
    });
    await made().connect(transport);
    return transport;
  };
  const handle = async (request, response) => {
    const message = await body(request);
    const id = request.headers["mcp-session-id"];
    if (id !== undefined && !sessions.has(id)) return response.writeHead(404).end();
    const transport = sessions.get(id) ?? (await opened());
    return transport.handleRequest(request, response, message.length ? JSON.parse(message) : undefined);
  };
  return { handle, stdio: () => made().connect(new StdioServerTransport()) };
}

function second() {
  const { McpServer, ResourceTemplate, createMcpHandler, inputRequired } = load("@modelcontextprotocol/server");
  const { serveStdio } = load("@modelcontextprotocol/server/stdio");
  const ask = (_, { mcpReq }) => {
    const answer = mcpReq.inputResponses?.who;
    const question = inputRequired.elicit({ message: "Who are you?", requestedSchema: NAME });
    return answer ? hello(answer) : inputRequired({ inputRequests: { who: question } });
  };
  const tell = ({ mcpReq }) => [mcpReq._meta?.progressToken, mcpReq.notify];
  const made = () => offer(new McpServer(...IDENTITY), ResourceTemplate, ask, tell);
  const { fetch } = createMcpHandler(made);
  const handle = async (request, response) => {
    const message = await body(request);
    const options = { method: request.method, headers: request.headers, ...(message.length ? { body: message } : {}) };
    const answer = await fetch(new Request(`http://${request.headers.host}${request.url}`, options));
    response.writeHead(answer.status, Object.fromEntries(answer.headers));
    for await (const chunk of answer.body ?? []) response.write(chunk);
    response.end();
  };
  return { handle, stdio: () => serveStdio(made) };
}

async function body(request) {
  const chunks = [];
  for await (const chunk of request) chunks.push(chunk);
  return Buffer.concat(chunks);
}

const { handle, stdio } = { 1: first, 2: second }[wanted.sdk]();
if (wanted.port) createServer(handle).listen(wanted.port, "127.0.0.1");
else await stdio();
