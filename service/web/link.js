// A search as the fragment of the page's URL. A link holds everything but an uploaded photo.

import { Problem } from "./api.js";

export const PAGE_SIZE = 12; // items per page
const MAX_LIMIT = 1000;

/** Formats a search as a fragment; empty for a search without query and filter. */
export function formatFragment({ query, box, filter, limit }) {
  const parts = new URLSearchParams();
  if (query?.kind === "item") parts.set("item", query.id);
  if (query?.kind === "example") parts.set("example", query.name);
  if (box) parts.set("box", box.join(","));
  if (Object.keys(filter).length) parts.set("filter", JSON.stringify(filter));
  if (limit !== PAGE_SIZE) parts.set("limit", String(limit));
  return parts.size ? `#${parts}` : "";
}

/** Parses a fragment into query, box, filter and limit; throws a Problem if any of them is invalid. */
export function parseFragment(fragment) {
  const parts = new URLSearchParams(fragment.replace(/^#/, ""));
  const query = parts.has("item") ? { kind: "item", id: parts.get("item") }
    : parts.has("example") ? { kind: "example", name: parts.get("example") } : null;
  return {
    query,
    box: parsePart(parts, "box", null, parseBox),
    filter: parsePart(parts, "filter", {}, parseFilter),
    limit: parsePart(parts, "limit", PAGE_SIZE, parseLimit),
  };
}

function parsePart(parts, name, defaultValue, parse) {
  if (!parts.has(name)) return defaultValue;
  const value = parse(parts.get(name));
  if (value !== undefined) return value;
  throw new Problem({
    title: "Invalid link", detail: `Its ${name} is “${parts.get(name).slice(0, 80)}”.`,
    remedy: "Check the link, or search with a photo.", status: 422,
  });
}

function parseBox(text) {
  const box = text.split(",").map(Number);
  const [left, top, right, bottom] = box;
  const isValid = box.length === 4 && box.every((share) => share >= 0 && share <= 1);
  return isValid && left < right && top < bottom ? box : undefined;
}

function parseFilter(text) {
  try {
    const filter = JSON.parse(text);
    return filter && typeof filter === "object" && !Array.isArray(filter) ? filter : undefined;
  } catch {
    return undefined;
  }
}

function parseLimit(text) {
  const limit = Number(text);
  return Number.isInteger(limit) && limit >= 1 && limit <= MAX_LIMIT ? limit : undefined;
}
