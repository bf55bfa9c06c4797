// A search as the fragment of the page's URL. A link holds everything but uploaded photos.

import { Problem } from "./api.js";

export const PAGE_SIZE = 12; // items per page
const MAX_LIMIT = 1000;

export const NO_OPTIONS = { group: "", diversity: 0 };

/** Formats a search as a fragment; empty for a search without examples, filter and options. */
export function formatFragment({ examples, box, filter, group, diversity, limit }) {
  const parts = new URLSearchParams();
  examples.forEach(({ kind, id, name, unlike }, position) => {
    if (kind === "photo") return;
    if (position === 0) parts.set(kind, id ?? name);
    else parts.append(unlike ? "unlike" : "like", `${kind}:${id ?? name}`);
  });
  if (box) parts.set("box", box.join(","));
  if (Object.keys(filter).length) parts.set("filter", JSON.stringify(filter));
  if (group) parts.set("group", group);
  if (diversity) parts.set("diversity", String(diversity));
  if (limit !== PAGE_SIZE) parts.set("limit", String(limit));
  return parts.size ? `#${parts}` : "";
}

/** Parses a fragment into examples and options of a search; throws a Problem if any of them is invalid. */
export function parseFragment(fragment) {
  const parts = new URLSearchParams(fragment.replace(/^#/, ""));
  const first = parts.has("item") ? [`item:${parts.get("item")}`]
    : parts.has("example") ? [`example:${parts.get("example")}`] : [];
  return {
    examples: [
      ...[...first, ...parts.getAll("like")].map((text) => parseExample("like", text)),
      ...parts.getAll("unlike").map((text) => ({ ...parseExample("unlike", text), unlike: true })),
    ],
    box: parsePart(parts, "box", null, parseBox),
    filter: parsePart(parts, "filter", {}, parseFilter),
    group: parts.get("group") ?? NO_OPTIONS.group,
    diversity: parsePart(parts, "diversity", NO_OPTIONS.diversity, parseShare),
    limit: parsePart(parts, "limit", PAGE_SIZE, parseLimit),
  };
}

function parsePart(parts, name, defaultValue, parse) {
  return parts.has(name) ? check(name, parts.get(name), parse) : defaultValue;
}

function check(name, text, parse) {
  const value = parse(text);
  if (value !== undefined) return value;
  throw new Problem({
    title: "Invalid link", detail: `Its ${name} is “${text.slice(0, 80)}”.`,
    remedy: "Check the link, or search with a photo.", status: 422,
  });
}

const parseExample = (name, text) => check(name, text, () => {
  const [, kind, value] = text.match(/^(item|example):(.+)$/s) ?? [];
  return kind && (kind === "item" ? { kind, id: value } : { kind, name: value });
});

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

function parseShare(text) {
  const share = Number(text);
  return text !== "" && share >= 0 && share <= 1 ? share : undefined;
}

function parseLimit(text) {
  const limit = Number(text);
  return Number.isInteger(limit) && limit >= 1 && limit <= MAX_LIMIT ? limit : undefined;
}
