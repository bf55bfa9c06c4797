// How the values of an item are shown, in the results and in its details.

import { displayName } from "./dom.js";

/** Creates the title of an item, a link if the item has a page in the shop. */
export function createTitle({ id, title, url }) {
  // Only web addresses become links: the catalogue is untrusted, and "javascript:" is a URL too.
  if (!/^https?:\/\//i.test(url)) return document.createTextNode(title || id);
  const link = document.createElement("a");
  Object.assign(link, { href: url, textContent: title || id, target: "_blank", rel: "noopener noreferrer" });
  return link;
}

/** Isolates a text whose direction may differ from its neighbours'. */
export function isolate(text) {
  const node = document.createElement("bdi");
  node.textContent = text;
  return node;
}

/** Formats a value; digits are grouped from 10,000, so that years are not. */
export function formatValue(value) {
  if (Array.isArray(value)) return value.map(formatValue).join(", ");
  if (typeof value === "boolean") return value ? "yes" : "no";
  return typeof value === "number" ? value.toLocaleString(undefined, { useGrouping: "min2" }) : value;
}

/** Formats an attribute for a list without names; numbers and booleans need theirs. */
export function formatFact([name, value]) {
  if (typeof value === "boolean") return value ? displayName(name) : `not ${displayName(name)}`;
  return typeof value === "string" ? value : `${displayName(name)} ${formatValue(value)}`;
}

export function formatPrice(price, currency) {
  if (typeof price !== "number") return price === undefined ? "" : String(price);
  try {
    return new Intl.NumberFormat(undefined, { style: "currency", currency }).format(price);
  } catch { // no currency in the catalogue, or not an ISO code
    return [price.toFixed(2), currency].filter(Boolean).join(" ");
  }
}
