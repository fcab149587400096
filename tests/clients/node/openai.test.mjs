// OpenAI's client for Node against a running service (BASE_URL, with its models in RESIDENT and QWEN). LOGIT_BIAS
// makes a model with random weights write a call without white space.

import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI, { NotFoundError, toFile } from "openai";

const { BASE_URL, RESIDENT, QWEN } = process.env;
const client = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: "none", maxRetries: 0, timeout: 120_000 });

const messages = [{ role: "user", content: "What is the capital of France?" }];
const cities = ["Oslo", "北京"];
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: cities } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", strict: true, parameters } }];
const toolChoice = { type: "function", function: { name: "get_weather" } };
const bias = { logit_bias: JSON.parse(process.env.LOGIT_BIAS) };
const off = { chat_template_kwargs: { enable_thinking: false } };

test("a chat is answered, and its stream joins to the same", async () => {
  const asked = { model: RESIDENT, messages, temperature: 0 };
  const whole = await client.chat.completions.create(asked);
  const said = whole.choices[0].message.content;
  assert.match(said, /Paris/);
  let joined = "";
  let usage = null;
  const stream = await client.chat.completions.create({
    ...asked,
    stream: true,
    stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    joined += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(joined, said);
  // A whole answer has nulls beside them.
  assert.equal(usage.prompt_tokens, whole.usage.prompt_tokens);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
});

test("the headers say who answered", async () => {
  const asked = { model: "auto", messages, max_tokens: 2 };
  const { response } = await client.chat.completions.create(asked).withResponse();
  assert.equal(response.headers.get("x-router-model"), RESIDENT);
});

test("a tool is called, and its result answered", async () => {
  const history = [{ role: "user", content: "Weather in Oslo?" }];
  const called = await client.chat.completions.create({
    model: QWEN,
    messages: history,
    tools,
    tool_choice: toolChoice,
    max_tokens: 100,
    ...bias,
    ...off,
  });
  const [call] = called.choices[0].message.tool_calls;
  assert.equal(call.function.name, "get_weather");
  assert.ok(cities.includes(JSON.parse(call.function.arguments).city));
  history.push(called.choices[0].message, { role: "tool", tool_call_id: call.id, content: "21 degrees" });
  const asked = { model: QWEN, messages: history, tools, tool_choice: "none", max_tokens: 12, ...off };
  const answered = await client.chat.completions.create(asked);
  assert.ok(answered.choices[0].message.content);
});

test("the client's own loop runs the tool with what was streamed of its arguments", async () => {
  const ran = [];
  const runnable = {
    type: "function",
    function: {
      name: "get_weather",
      parameters,
      parse: JSON.parse,
      function: (given) => {
        ran.push(given.city);
        return "21 degrees";
      },
    },
  };
  const runner = client.chat.completions.runTools({
    model: QWEN,
    messages: [{ role: "user", content: "Weather in Oslo?" }],
    tools: [runnable],
    tool_choice: toolChoice,
    max_tokens: 100,
    stream: true,
    ...bias,
    ...off,
  });
  await runner.done();
  assert.equal(ran.length, 1);
  assert.ok(cities.includes(ran[0]));
});

test("an answer is held to a schema and read by it", async () => {
  const answer = await client.chat.completions.parse({
    model: QWEN,
    messages,
    max_tokens: 100,
    response_format: { type: "json_schema", json_schema: { name: "c", strict: true, schema: parameters } },
    ...off,
  });
  assert.ok(cities.includes(JSON.parse(answer.choices[0].message.content).city));
});

test("a response is kept, streamed and continued", async () => {
  const asked = { model: RESIDENT, temperature: 0, max_output_tokens: 30 };
  const first = await client.responses.create({ ...asked, input: "What is the capital of France?" });
  assert.match(first.output_text, /Paris/);
  const kinds = [];
  const stream = await client.responses.create({
    ...asked,
    input: "And of Italy?",
    previous_response_id: first.id,
    stream: true,
  });
  for await (const event of stream) kinds.push(event.type);
  assert.deepEqual([kinds[0], kinds.at(-1)], ["response.created", "response.completed"]);
});

test("models are listed", async () => {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert.ok(ids.includes(RESIDENT) && ids.includes(QWEN));
});

test("a file of requests becomes a batch whose answers can be read", async () => {
  const body = { model: RESIDENT, messages, max_tokens: 12, temperature: 0 };
  const line = { custom_id: "one", method: "POST", url: "/v1/chat/completions", body };
  const content = await toFile(Buffer.from(JSON.stringify(line) + "\n"), "in.jsonl");
  const file = await client.files.create({ file: content, purpose: "batch" });
  const asked = { input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h" };
  let batch = await client.batches.create(asked);
  const deadline = Date.now() + 60_000;
  while (!["completed", "failed", "expired"].includes(batch.status)) {
    assert.ok(Date.now() < deadline, `still ${batch.status}`);
    await new Promise((resolve) => setTimeout(resolve, 200));
    batch = await client.batches.retrieve(batch.id);
  }
  assert.equal(batch.status, "completed");
  const answered = JSON.parse(await (await client.files.content(batch.output_file_id)).text());
  assert.equal(answered.custom_id, "one");
  assert.match(answered.response.body.choices[0].message.content, /Paris/);
});

test("an unknown model is the client's own error", async () => {
  await assert.rejects(client.chat.completions.create({ model: "no-such", messages }), NotFoundError);
});

test("a stream that is left ends", async () => {
  const stream = await client.chat.completions.create({ model: RESIDENT, messages, max_tokens: 500, stream: true });
  for await (const _ of stream) break;
  assert.ok(stream.controller.signal.aborted);
});
