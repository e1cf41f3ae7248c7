// vscode-jsonrpc calls a server over its stdin and stdout, or over TCP. Prints what it got, as JSON.
// Arguments: the folder of the package, then "tcp" and a port, or "stdio" and a command line.
import { spawn } from "node:child_process";
import { createRequire } from "node:module";
import { connect } from "node:net";

const [modules, transport, ...words] = process.argv.slice(2);
const load = createRequire(`${modules}/here.js`);
const rpc = load("vscode-jsonrpc/node");

let reader, writer, end;
if (transport === "tcp") {
  const socket = connect(Number(words[0]), "127.0.0.1");
  reader = new rpc.StreamMessageReader(socket);
  writer = new rpc.StreamMessageWriter(socket);
  end = () => socket.end();
} else {
  const child = spawn(words[0], words.slice(1), { stdio: ["pipe", "pipe", "inherit"] });
  reader = new rpc.StreamMessageReader(child.stdout);
  writer = new rpc.StreamMessageWriter(child.stdin);
  end = () => child.stdin.end();
}
const connection = rpc.createMessageConnection(reader, writer);
connection.listen();

const byName = rpc.ParameterStructures.byName;
const request = (name, params) => connection.sendRequest(new rpc.RequestType(name, byName), params);
const failed = (promise) => promise.then(() => null, ({ code, message, data }) => ({ code, message, data }));

const found = {};
found.sum = await request("add", { a: 2, b: 3 });
found.text = await request("echo", { text: "Zoë 👍 日本" });
await connection.sendNotification(new rpc.NotificationType("note", byName), { text: "ü" });
found.noted = await connection.sendRequest("noted");
found.counted = [];
connection.onNotification("counted", ({ number }) => found.counted.push(number));
await request("count", { n: 3 });
found.refused = await failed(connection.sendRequest("refuse"));
found.unknown = await failed(connection.sendRequest("nothing"));
const source = new rpc.CancellationTokenSource();
const cancelled = failed(connection.sendRequest("forever", source.token));
await connection.sendRequest("noted");
source.cancel();
found.cancelled = await cancelled;
console.log(JSON.stringify(found));
connection.dispose();
end();
