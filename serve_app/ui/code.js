// A request as code that a person can run: curl, Python and JavaScript. A key is named, never shown.

import { base, key } from "./api.js";

// What OpenAI's client for Python knows by name; the rest goes into `extra_body`.
const OWN = new Set(["model", "messages", "stream", "temperature", "max_tokens", "tools", "response_format"]);

const indented = (text, by) => text.replaceAll("\n", `\n${by}`);

function python(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return value.length ? `[\n${value.map((each) => `    ${indented(python(each), "    ")},\n`).join("")}]` : "[]";
  if (typeof value === "object") {
    const rows = Object.entries(value).map(([name, each]) => `    ${JSON.stringify(name)}: ${indented(python(each), "    ")},\n`);
    return rows.length ? `{\n${rows.join("")}}` : "{}";
  }
  return JSON.stringify(value); // JSON's strings and numbers are Python's
}

function inPython(body) {
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !OWN.has(name)));
  const rows = Object.entries(body)
    .filter(([name]) => OWN.has(name))
    .map(([name, value]) => `    ${name}=${indented(python(value), "    ")},\n`);
  if (Object.keys(extra).length) rows.push(`    extra_body=${indented(python(extra), "    ")},\n`);
  return `import os

from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(`${base()}/v1`)}, api_key=os.environ.get("SWITCHYARD_KEY", "none"))
stream = client.chat.completions.create(
${rows.join("")})
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
`;
}

function inJavaScript(body) {
  return `import OpenAI from "openai";

const client = new OpenAI({ baseURL: ${JSON.stringify(`${base()}/v1`)}, apiKey: process.env.SWITCHYARD_KEY ?? "none" });
const stream = await client.chat.completions.create(${JSON.stringify(body, null, 2)});
for await (const chunk of stream) {
  process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
}
`;
}

function inCurl(body) {
  const lines = [`curl --no-buffer ${base()}/v1/chat/completions`, "-H 'content-type: application/json'"];
  if (key()) lines.push('-H "authorization: Bearer $SWITCHYARD_KEY"');
  lines.push(`-d '${JSON.stringify(body, null, 2).replaceAll("'", "'\\''")}'`);
  return `${lines.join(" \\\n  ")}\n`;
}

const LANGUAGES = { curl: inCurl, python: inPython, javascript: inJavaScript };

export function asCode(body, name) {
  const { stream_options: _, ...shown } = body; // the page's own wish
  return LANGUAGES[name](shown);
}
