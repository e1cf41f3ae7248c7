// What the agents in JavaScript share; shopper.py is the same in Python, and says what they do.

const RUNS = 3;
export const PATIENCE = 3000; // milliseconds

const [url, order] = process.argv.slice(2);
let answers = [];

/** Return the model's next tool call, as [tool, arguments]; null if it is content. */
function nextCall(seen) {
  answers = seen;
  const charge = ['charge', { order, cents: 450 }];
  if (seen.length === 0) return ['price', { sku: 'tea' }];
  const last = seen[seen.length - 1];
  if (last.tool === 'price') return charge;
  if (last.is_error && seen.length < 6) return charge;
  return null;
}

/** Return the tools' answers in a prompt of the AI SDK. */
function answersIn(prompt) {
  const seen = [];
  for (const message of prompt) {
    if (message.role !== 'tool') continue;
    for (const part of message.content) {
      if (part.type !== 'tool-result') continue;
      const text = JSON.stringify(part.output.value);
      const isError = part.output.type.startsWith('error') || text.includes('"isError":true');
      seen.push({ tool: part.toolName.replace(/^shop_/, ''), is_error: isError, text });
    }
  }
  return seen;
}

/** Return what a language model of the AI SDK generates for a prompt. `prefix` stands before the names of tools. */
export function generate(prompt, prefix = '') {
  const seen = answersIn(prompt);
  const call = nextCall(seen);
  const usage = {
    inputTokens: { total: 1, noCache: 1, cacheRead: 0, cacheWrite: 0 },
    outputTokens: { total: 1, text: 1, reasoning: 0 },
  };
  if (call === null) {
    return { content: [{ type: 'text', text: 'done' }], finishReason: { unified: 'stop', raw: 'stop' }, usage, warnings: [] };
  }
  const [tool, input] = call;
  const content = [
    { type: 'tool-call', toolCallId: `call-${seen.length}`, toolName: prefix + tool, input: JSON.stringify(input) },
  ];
  return { content, finishReason: { unified: 'tool-calls', raw: 'tool-calls' }, usage, warnings: [] };
}

/** Run an agent until it ends without an exception, and print what its model has seen. */
export async function shop(agent) {
  for (let runs = 1; ; runs += 1) {
    try {
      await agent(url);
      console.log(JSON.stringify({ runs, answers }));
      process.exit(0);
    } catch (error) {
      console.error(`run ${runs} failed: ${error}`);
      if (runs === RUNS) process.exit(1);
    }
  }
}
