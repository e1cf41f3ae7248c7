// An agent of Mastra. Its MCP client declares elicitation, and opens a new session when the old one has failed.

import { Agent } from '@mastra/core/agent';
import { MCPClient } from '@mastra/mcp';
import { MockLanguageModelV3 } from 'ai/test';
import { PATIENCE, generate, shop } from './shopper.mjs';

await shop(async (url) => {
  const mcp = new MCPClient({ id: `shop-${Math.random()}`, servers: { shop: { url: new URL(url) } }, timeout: PATIENCE });
  try {
    const model = new MockLanguageModelV3({ doGenerate: async ({ prompt }) => generate(prompt, 'shop_') });
    const tools = await mcp.listTools();
    const agent = new Agent({ id: 'shopper', name: 'shopper', instructions: 'Buy tea.', model, tools });
    await agent.generate('buy tea', { maxSteps: 8 });
  } finally {
    await mcp.disconnect().catch(() => {});
  }
});
