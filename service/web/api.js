// Requests to the service: the key goes along, and whatever fails becomes a Problem to show.

import { askForKey, heldKey } from "./key.js";

export class Problem extends Error {
  constructor({ title, detail, remedy, status = 0, request_id: id }) {
    super(detail);
    Object.assign(this, { title, detail, remedy, status, id });
  }

  /** Whether the same request may succeed later. */
  get passing() {
    return this.status === 0 || this.status === 429 || this.status >= 500;
  }
}

/** The response to a request. Without a valid key a person is asked for one, unless it is `background` work. */
async function ask(address, { background = false, ...options } = {}) {
  for (;;) {
    const key = heldKey();
    const response = await send(address, key, options);
    if (response.ok) return response;
    const problem = await problemOf(response);
    if (problem.status !== 401 || background || !(await askForKey(key, problem))) throw problem;
  }
}

export const askJson = async (address, options) => read(await ask(address, options), "json");

export const askBlob = async (address, options) => read(await ask(address, options), "blob");

/** The body of a response. It may break off, or be another one's: a proxy or a login in between answers with a page. */
async function read(response, form) {
  try {
    return await response[form]();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw unreadable(response);
  }
}

const unreadable = ({ status, statusText }) => new Problem({
  title: "Something on the way failed", detail: `The answer was ${status} ${statusText}`.trim() + ".",
  remedy: "Try again in a moment.", status: status < 400 ? 502 : status,
});

async function send(address, key, options) {
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  try {
    return await fetch(address, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({
      title: "The service cannot be reached", detail: "No answer came back.",
      remedy: "Check your connection, then try again.",
    });
  }
}

async function problemOf(response) {
  if ((response.headers.get("Content-Type") ?? "").startsWith("application/problem+json")) {
    return new Problem(await read(response, "json"));
  }
  return unreadable(response);
}
