// openai for Node: conversations, streams, calls of tools by its runner, responses, errors, an aborted stream.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL });
const model = process.env.MODEL;
const talk = [{ role: "user", content: "What is the capital of France?" }];
const chat = { model, messages: talk, temperature: 0, max_tokens: 48 };

const whole = await client.chat.completions.create(chat);
const said = whole.choices[0].message.content;
assert.match(said, /Paris/);

const stream = client.chat.completions.stream(chat);
assert.equal(await stream.finalContent(), said);

let asked;
const runner = client.chat.completions.runTools({
  ...chat,
  tool_choice: { type: "function", function: { name: "weather" } },
  tools: [
    {
      type: "function",
      function: {
        name: "weather",
        parameters: {
          type: "object",
          properties: { city: { type: "string", maxLength: 20 } },
          required: ["city"],
        },
        parse: JSON.parse,
        function: ({ city }) => ((asked = city), "sunny"),
      },
    },
  ],
});
await runner.done();
assert.equal(typeof asked, "string");

const response = await client.responses.create({
  model,
  input: talk[0].content,
  temperature: 0,
  max_output_tokens: 48,
});
assert.equal(response.output_text, said);

await assert.rejects(client.chat.completions.create({ ...chat, model: "absent" }), OpenAI.NotFoundError);

const left = await client.chat.completions.create({ ...chat, max_tokens: 2000, min_tokens: 2000, stream: true });
let parts = 0;
for await (const _ of left) {
  if (++parts === 3) left.controller.abort();
}
console.log(JSON.stringify({ said, asked, parts }));
