// The official client for TypeScript, 1.x or 2.x, calls tools as ordered, one order per line of stdin:
//
//     {"id": 1, "call": {"name": "unknown", "arguments": {...}, "_meta": {...}}}
//     {"id": 1, "abort": true}                                                      give up that call
//
// and prints {"id": 1, "result": {...}} or {"id": 1, "error": "...", "code": 50910}. After an error the next call has a new client, as in a
// program that connects again. Its only argument: {"modules": ".../node_modules", "sdk": 1, "revision": "...", "url": "..."}

import { createRequire } from "node:module";
import { join } from "node:path";
import { createInterface } from "node:readline";

const wanted = JSON.parse(process.argv[2]);
const load = createRequire(join(wanted.modules, "here.js"));
const TIMEOUT = 60_000;

function first() {
  const { Client } = load("@modelcontextprotocol/sdk/client/index.js");
  const http = load("@modelcontextprotocol/sdk/client/streamableHttp.js");
  const client = new Client({ name: "lost", version: "1" });
  const call = (params, options) => client.callTool(params, undefined, options);
  return { client, call, Transport: http.StreamableHTTPClientTransport };
}

function second() {
  const http = load("@modelcontextprotocol/client");
  const mode = wanted.revision === "2026-07-28" ? "auto" : "legacy";
  const client = new http.Client({ name: "lost", version: "1" }, { versionNegotiation: { mode } });
  const call = (params, options) => client.callTool(params, options);
  return { client, call, Transport: http.StreamableHTTPClientTransport };
}

async function connected() {
  const { client, call, Transport } = wanted.sdk === 1 ? first() : second();
  const transport = new Transport(new URL(wanted.url));
  const send = transport.send.bind(transport);
  // The clients always offer their newest revision of the handshake; this makes them offer another one.
  transport.send = (message, options) => {
    const offers = message.method === "initialize";
    return send(offers ? { ...message, params: { ...message.params, protocolVersion: wanted.revision } } : message, options);
  };
  await client.connect(transport);
  return { client, call };
}

let current;
const aborts = new Map();

async function serve(order) {
  const aborting = new AbortController();
  aborts.set(order.id, aborting);
  try {
    current ??= connected();
    const { call } = await current;
    const result = await call(order.call, { signal: aborting.signal, timeout: TIMEOUT });
    console.log(JSON.stringify({ id: order.id, result }));
  } catch (error) {
    const old = current;
    if (!aborting.signal.aborted) current = undefined;
    console.log(JSON.stringify({ id: order.id, error: String(error), code: error.code }));
    if (current === undefined) old?.then(({ client }) => client.close()).catch(() => undefined);
  } finally {
    aborts.delete(order.id);
  }
}

process.on("unhandledRejection", () => undefined);
for await (const line of createInterface({ input: process.stdin })) {
  const order = JSON.parse(line);
  if (order.abort) aborts.get(order.id)?.abort();
  else void serve(order);
}
process.exit(0);
