// Requests to the server: JSON in both directions, errors as messages.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** GET /api/PATH as JSON. A request that was refused by the rate limit is repeated after the given delay. */
export async function get(path, query = {}, { signal } = {}) {
  for (;;) {
    const answer = await reach(address(path, query), { signal });
    if (answer.status !== 429) return read(answer);
    await pause(1000 * Math.min(10, Number(answer.headers.get("Retry-After")) || 1));
  }
}

/** POST JSON to /api/PATH. */
export async function post(path, body = {}, { signal } = {}) {
  return read(await send(path, body, signal));
}

/** POST and return the response itself, for streamed answers. */
export async function send(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return reach(address(path), { method: "POST", headers, body: JSON.stringify(body), signal });
}

/** POST, and yield the server-sent events of the answer as [kind, data]. */
export async function* hear(path, body, signal) {
  const answer = await send(path, body, signal);
  if (!answer.ok) await read(answer); // throws the server's error
  const decoder = new TextDecoder();
  let waiting = "";
  for await (const bytes of chunks(answer.body)) {
    const parts = (waiting + decoder.decode(bytes, { stream: true })).split("\n\n");
    waiting = parts.pop();
    for (const part of parts) {
      const fields = Object.fromEntries(part.split("\n").map((line) => line.split(/: (.*)/s)));
      if (fields.event) yield [fields.event, JSON.parse(fields.data)];
    }
  }
}

/** The chunks of a stream. Not every browser can iterate over a stream. */
async function* chunks(stream) {
  const reader = stream.getReader();
  try {
    for (let got = await reader.read(); !got.done; got = await reader.read()) yield got.value;
  } finally {
    reader.cancel().catch(() => {});
  }
}

export function address(path, query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const words = new URLSearchParams(kept).toString();
  return `/api/${path}${words ? `?${words}` : ""}`;
}

async function reach(url, options) {
  try {
    return await fetch(url, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer. Is `tether studio` still running?");
  }
}

/** The JSON of a response; throws its error. */
export async function read(answer) {
  const text = await answer.text();
  let body = null;
  try {
    body = text ? JSON.parse(text) : null;
  } catch {
    throw new ApiError(answer.status, `The server answered ${answer.status} with something that is not JSON.`);
  }
  if (answer.ok) return body;
  throw new ApiError(answer.status, reason(answer.status, body));
}

function reason(status, body) {
  if (status === 401) return "This session has ended. Open Studio again with the link that `tether studio` printed.";
  const said = body?.error ?? body?.detail;
  if (typeof said === "string") return said;
  return `The server answered ${status}${said ? `: ${JSON.stringify(said)}` : ""}.`;
}

export function pause(milliseconds) {
  return new Promise((wake) => setTimeout(wake, milliseconds));
}

/** A random id; works without a secure context too. */
export function uid() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
