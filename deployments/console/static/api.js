// Talking to the server: JSON, server-sent events, errors that name a field. Addresses are relative to /console/.

const KEY = "turnout-api-key";

export function apiKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export class ApiError extends Error {
  constructor(status, message, field, retryAfter) {
    super(message);
    this.status = status;
    this.field = field;
    this.retryAfter = retryAfter;
  }
}

function headers(more = {}) {
  const key = apiKey();
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function refusal(response) {
  const text = await response.text();
  let error = {};
  try { error = JSON.parse(text).error ?? {}; } catch { /* not ours: a proxy's page */ }
  const message = error.message ?? `the server answered ${response.status}`;
  return new ApiError(response.status, message, error.param ?? null, response.headers.get("Retry-After"));
}

export async function get(path, signal) {
  let response;
  try {
    response = await fetch(`../${path}`, { headers: headers(), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the server cannot be reached", null, null);
  }
  if (!response.ok) throw await refusal(response);
  return response.json();
}

// Posts a body and yields the events of the answer; aborting the signal closes the connection, which ends the work.
export async function* stream(path, body, signal) {
  let response;
  try {
    response = await fetch(`../${path}`, {
      method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body), signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the server cannot be reached", null, null);
  }
  if (!response.ok) throw await refusal(response);
  for await (const data of events(response.body.getReader())) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(response.status, event.error.message, event.error.param ?? null, null);
    yield event;
  }
  throw new ApiError(0, "the connection ended before the answer did", null, null);
}

// The browser's own words for a connection that was cut differ, and say nothing.
async function next(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the connection to the server was lost", null, null);
  }
}

async function* events(reader) {
  const decoder = new TextDecoder();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await next(reader);
      if (done) return;
      buffer += decoder.decode(value, { stream: true });
      const whole = buffer.split("\n\n");
      buffer = whole.pop();
      for (const event of whole) {
        const lines = event.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    // Nobody reads on: what still comes is not waited for.
    reader.cancel().catch(() => {});
  }
}
