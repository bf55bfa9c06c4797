// Requests to the service: adds the API key and converts every failure to a Problem.

import { requestKey, storedKey } from "./key.js";
import { rephrase } from "./messages.js";

export class Problem extends Error {
  constructor({ title, detail, remedy, status = 0, request_id: id }) {
    super(detail);
    Object.assign(this, { title, detail, remedy, status, id });
  }

  /** Whether the same request may succeed later. */
  get retryable() {
    return this.status === 0 || this.status === 429 || this.status >= 500;
  }
}

/** Sends a request and returns its response. Asks the user for a key if it is refused, except in the `background`. */
async function request(address, { background = false, ...options } = {}) {
  for (;;) {
    const key = storedKey();
    const response = await send(address, key, options);
    if (response.ok) return response;
    const problem = await readProblem(response);
    if (problem.status !== 401 || background || !(await requestKey(key, problem))) throw problem;
  }
}

export const fetchJson = async (address, options) => readBody(await request(address, options), "json");

export const fetchBlob = async (address, options) => readBody(await request(address, options), "blob");

/** Reads the body of a response, which may be cut off, or be the HTML page of a proxy or a login. */
async function readBody(response, format) {
  try {
    return await response[format]();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw unexpectedResponse(response);
  }
}

const unexpectedResponse = ({ status, statusText }) => new Problem({
  title: "Unexpected response", detail: `The server responded with ${status} ${statusText}`.trim() + ".",
  remedy: "Try again in a moment.", status: status < 400 ? 502 : status,
});

async function send(address, key, options) {
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  try {
    return await fetch(address, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({
      title: "The service cannot be reached", detail: "There was no response.",
      remedy: "Check your connection, then try again.",
    });
  }
}

async function readProblem(response) {
  if ((response.headers.get("Content-Type") ?? "").startsWith("application/problem+json")) {
    return new Problem(rephrase(await readBody(response, "json")));
  }
  return unexpectedResponse(response);
}
