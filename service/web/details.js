// The details of an item, in a dialog: its id, all its attributes and all its photos.

import { fetchJson } from "./api.js";
import { announce, element, heading, pluralize } from "./dom.js";
import { createTitle, formatValue, isolate } from "./item.js";

const dialog = element("item-dialog");
let shown = null; // the result whose details are shown
let actions = {}; // of its buttons

/** Opens the dialog with a result; the other photos of the item follow when they are loaded. */
export async function showDetails(item, itemActions) {
  shown = item;
  actions = itemActions;
  showItem({ ...item, images: [item.image] });
  element("item-problem").textContent = "";
  dialog.setAttribute("aria-busy", "true");
  dialog.showModal();
  dialog.scrollTop = 0;
  try {
    const complete = await fetchJson(`v1/items/${encodeURIComponent(item.id)}`);
    if (shown !== item) return;
    showItem(complete);
    announce(`${pluralize(complete.images.length, "photo")} of this item.`);
  } catch (error) {
    if (error.status === undefined) throw error;
    if (shown === item) element("item-problem").textContent = `Only one photo could be loaded. ${error.detail}`;
  }
  dialog.setAttribute("aria-busy", "false");
}

function showItem(item) {
  element("item-title").replaceChildren(createTitle(item));
  const id = document.createElement("code");
  id.textContent = item.id;
  const attributes = Object.entries(item.attributes)
    .map(([name, value]) => [heading(name), isolate(formatValue(value))]);
  element("item-facts").replaceChildren(...[["Item ID", id], ...attributes].map(createRow));
  element("item-photos").replaceChildren(...item.images.map(({ url }, index) => {
    const photo = document.createElement("img");
    Object.assign(photo, { src: url, alt: `Photo ${index + 1} of ${item.images.length}`, draggable: false });
    const entry = document.createElement("li");
    entry.append(photo);
    return entry;
  }));
}

function createRow([name, value]) {
  const [row, term, description] = ["div", "dt", "dd"].map((tag) => document.createElement(tag));
  term.append(isolate(name));
  description.append(value);
  row.append(term, description);
  return row;
}

element("item-close").addEventListener("click", () => dialog.close());
// A new search closes the dialog.
element("item-similar").addEventListener("click", () => actions.searchSimilar(shown));
element("item-like").addEventListener("click", () => actions.like(shown));
element("item-unlike").addEventListener("click", () => actions.unlike(shown));
dialog.addEventListener("click", (event) => {
  if (event.target === dialog) dialog.close(); // the backdrop: everything else is inside the content
});
// The event arrives after the dialog closed: by then it may show the next item.
dialog.addEventListener("close", () => { if (!dialog.open) shown = null; });
