// The cases with OpenAI's client for Node, as it comes: `node run_cases.mjs FILE` reads address, keys and cases from
// the file, and writes what the client makes of each case to standard output, as JSON by name.
import { readFile } from "node:fs/promises";
import OpenAI from "openai";

const GIVE_UP_MS = 500;
const FREED_WITHIN_MS = 5000;

const given = JSON.parse(await readFile(process.argv[2], "utf-8"));

async function isIdle() {
  const { pools } = await (await fetch(`${given.url}/status`)).json();
  const held = Object.values(pools).flat();
  return held.every((each) => each.requests + each.batch_requests + each.used_blocks === 0);
}

async function freed() {
  const until = Date.now() + FREED_WITHIN_MS;
  while (Date.now() < until) {
    if (await isIdle()) return true;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  return false;
}

async function answer(client, { call, arguments: body, then }) {
  if (call === "models.list") {
    const value = [];
    for await (const model of client.models.list()) value.push(model);
    return { value };
  }
  if (call === "models.retrieve") return { value: await client.models.retrieve(body.model) };
  const endpoints = {
    "completions.create": client.completions,
    "chat.completions.create": client.chat.completions,
    "responses.create": client.responses,
  };
  const endpoint = endpoints[call];
  let got = await endpoint.create(body);
  if (then === "go on" && call === "responses.create") {
    got = await endpoint.create({ ...body, previous_response_id: got.id });
  } else if (then === "go on") {
    const said = got.choices[0].message;
    got = await endpoint.create({ ...body, messages: [...body.messages, said, ...body.messages] });
  }
  if (!body.stream) return { value: got };
  const chunks = [];
  for await (const chunk of got) {
    chunks.push(chunk);
    if (then === "close") {
      got.controller.abort();
      break;
    }
  }
  return { chunks };
}

function told(error) {
  const { status, code, param, type, message, headers } = error;
  return {
    error: {
      class: error.constructor.name,
      message,
      status,
      code,
      param,
      type,
      retry_after: headers?.get?.("retry-after") ?? null,
    },
  };
}

const results = {};
for (const one of given.cases) {
  const timeout = one.then === "give up" ? GIVE_UP_MS : 60_000;
  const client = new OpenAI({ baseURL: `${given.url}/v1`, apiKey: one.key, maxRetries: 0, timeout });
  let result;
  try {
    result = await answer(client, one);
  } catch (error) {
    if (!(error instanceof OpenAI.OpenAIError)) throw error;
    result = told(error);
  }
  if (["close", "give up"].includes(one.then)) result.freed = await freed();
  results[one.name] = result;
}
process.stdout.write(JSON.stringify(results));
