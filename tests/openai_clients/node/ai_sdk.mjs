// Vercel's AI SDK: texts, streams, objects of a schema and calls of tools.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "trtmesh",
  baseURL: process.env.BASE_URL,
  supportsStructuredOutputs: true,
});
const model = provider(process.env.MODEL);
const asked = { model, prompt: "What is the capital of France?", temperature: 0, maxOutputTokens: 64 };

const { text: said } = await generateText(asked);
assert.match(said, /Paris/);

let streamed = "";
for await (const part of streamText(asked).textStream) streamed += part;
assert.equal(streamed, said);

const schema = z.object({ city: z.string().max(20), country: z.string().max(20) });
const { output } = await generateText({ ...asked, output: Output.object({ schema }) });
schema.parse(output);

const { toolCalls } = await generateText({
  ...asked,
  tools: { weather: tool({ inputSchema: z.object({ city: z.string().max(20) }) }) },
  toolChoice: "required",
  stopWhen: stepCountIs(1),
});
assert.equal(toolCalls[0].toolName, "weather");
assert.equal(typeof toolCalls[0].input.city, "string");
console.log(JSON.stringify({ said, output, call: toolCalls[0].input }));
