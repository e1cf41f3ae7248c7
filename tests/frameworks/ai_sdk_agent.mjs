// An agent of Vercel's AI SDK. It gives a failed tool call back to the model.

import { createMCPClient } from '@ai-sdk/mcp';
import { generateText, isStepCount } from 'ai';
import { MockLanguageModelV4 } from 'ai/test';
import { PATIENCE, generate, shop } from './shopper.mjs';

await shop(async (url) => {
  const client = await createMCPClient({ transport: { type: 'http', url } });
  try {
    const model = new MockLanguageModelV4({ doGenerate: async ({ prompt }) => generate(prompt) });
    const tools = await client.tools();
    const abortSignal = AbortSignal.timeout(PATIENCE * 4);
    await generateText({ model, tools, prompt: 'buy tea', stopWhen: isStepCount(8), abortSignal });
  } finally {
    await client.close().catch(() => {});
  }
});
