// A search as the fragment of the page's address: what a link can carry. A photo itself it cannot.

import { Problem } from "./api.js";

export const PAGE = 12; // items that a search asks for, and "Show more" adds
const MOST = 1000;

/** The fragment of a search; empty when there is nothing to say. */
export function fragmentOf({ query, box, filter, top }) {
  const parts = new URLSearchParams();
  if (query?.kind === "item") parts.set("item", query.id);
  if (query?.kind === "example") parts.set("example", query.name);
  if (box) parts.set("box", box.join(","));
  if (Object.keys(filter).length) parts.set("filter", JSON.stringify(filter));
  if (top !== PAGE) parts.set("top", String(top));
  return parts.size ? `#${parts}` : "";
}

/** The search of a fragment: query, box, filter and top. A damaged one is refused rather than half understood. */
export function readFragment(fragment) {
  const parts = new URLSearchParams(fragment.replace(/^#/, ""));
  const query = parts.has("item") ? { kind: "item", id: parts.get("item") }
    : parts.has("example") ? { kind: "example", name: parts.get("example") } : null;
  return {
    query,
    box: read(parts, "box", null, asBox),
    filter: read(parts, "filter", {}, asFilter),
    top: read(parts, "top", PAGE, asTop),
  };
}

function read(parts, name, otherwise, understand) {
  if (!parts.has(name)) return otherwise;
  const value = understand(parts.get(name));
  if (value !== undefined) return value;
  throw new Problem({
    title: "The link is damaged", detail: `Its ${name} is “${parts.get(name).slice(0, 80)}”.`,
    remedy: "Ask for it again, or start with a photo.", status: 422,
  });
}

function asBox(text) {
  const box = text.split(",").map(Number);
  const [left, top, right, bottom] = box;
  const whole = box.length === 4 && box.every((share) => share >= 0 && share <= 1);
  return whole && left < right && top < bottom ? box : undefined;
}

function asFilter(text) {
  try {
    const filter = JSON.parse(text);
    return filter && typeof filter === "object" && !Array.isArray(filter) ? filter : undefined;
  } catch {
    return undefined;
  }
}

function asTop(text) {
  const top = Number(text);
  return Number.isInteger(top) && top >= 1 && top <= MOST ? top : undefined;
}
