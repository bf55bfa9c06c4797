// The examples of a search: the pictures that show them, and what the service receives.
//
// An example is {kind: "photo", blob, photoId}, {kind: "example", name} or {kind: "item", id, title, picture}; with
// `unlike` it is one that the results should not be like. The first one is shown large, and is never unlike.

import { fetchBlob, fetchJson, Problem } from "./api.js";
import { showBox } from "./box.js";
import { cloneTemplate, element } from "./dom.js";

const UNLIKE_WEIGHT = 0.5; // of all examples that are unlike, together, relative to those that are like
const BASE64_GROWTH = 4 / 3;

const downloads = new Map(); // blobs of the service's example photos by their name
const addresses = new WeakMap(); // of blobs
let shown = null; // the example that is shown large
let onChange = () => {};

/** Calls `callback` with the examples that are left, or of which one changed sides. */
export function onExamplesChange(callback) {
  onChange = callback;
}

/** Puts an example that is like the wanted items first; there is no search without one. */
export function arrange(examples) {
  const first = examples.find(({ unlike }) => !unlike);
  return first ? [first, ...examples.filter((example) => example !== first)] : [];
}

export const isSame = (a, b) => a.kind === b.kind && ["id", "name", "photoId"].every((key) => a[key] === b[key]);

// --- loading --------------------------------------------------------------------------------------------

/** Loads the photos of the service's examples, and titles and pictures of items, of which a link has only the ids. */
export async function loadExamples(examples, signal) {
  await Promise.all(examples.map((example) => example.kind === "item" ? completeItem(example, signal)
    : loadPhoto(example, signal)));
}

async function loadPhoto(example, signal) {
  if (example.blob) return;
  const { name } = example;
  if (!downloads.has(name)) downloads.set(name, await fetchBlob(`examples/${encodeURIComponent(name)}`, { signal }));
  example.blob = downloads.get(name);
}

/** Loads title and picture of an item if the key permits it. */
async function completeItem(item, signal) {
  if (item.picture) return;
  try {
    const { title, images } = await fetchJson(`v1/items/${encodeURIComponent(item.id)}`, { signal });
    Object.assign(item, { title, picture: images[0]?.url });
  } catch (error) {
    if (![403, 404].includes(error.status)) throw error; // the search itself reports an unknown item
  }
}

// --- requests -------------------------------------------------------------------------------------------

/** Checks the size of what would be sent. */
export function checkSize(examples, maxBytes) {
  const blobs = examples.map(({ blob }) => blob).filter(Boolean);
  const isForm = examples.length === 1;
  const size = blobs.reduce((sum, blob) => sum + blob.size, 0) * (isForm ? 1 : BASE64_GROWTH);
  if (size <= maxBytes) return;
  const several = blobs.length > 1;
  throw new Problem({
    title: several ? "The photos are too large" : "The photo is too large",
    detail: several ? `Together they need ${megabytes(size)}; the limit is ${megabytes(maxBytes)}.`
      : `It has ${megabytes(size)}; the limit is ${megabytes(maxBytes)}.`,
    remedy: several ? "Remove one, or choose smaller ones." : "Choose a smaller one.", status: 413,
  });
}

const megabytes = (bytes) => `${(bytes / 1024 ** 2).toFixed(1)} MB`;

/** Returns the options of `fetch` for a search: a form for a single photo, else JSON. The box is of the first. */
export async function encodeSearch(examples, box, options) {
  const [first] = examples;
  if (examples.length > 1) {
    const unlike = examples.filter((example) => example.unlike).length;
    const weight = -UNLIKE_WEIGHT * Math.min(1, (examples.length - unlike) / unlike);
    const encoded = await Promise.all(examples.map(async (example) => ({
      ...(example.kind === "item" ? { item_id: example.id } : { image: await toBase64(example.blob) }),
      ...(example === first && box && { box }),
      ...(example.unlike && { weight }),
    })));
    return encodeJson({ examples: encoded, ...options });
  }
  if (first.kind === "item") return encodeJson({ item_id: first.id, ...options });
  const form = new FormData();
  form.append("image", first.blob);
  if (box) form.append("box", box.join(","));
  for (const [name, value] of Object.entries(options)) {
    form.append(name, typeof value === "object" ? JSON.stringify(value) : value);
  }
  return { method: "POST", body: form };
}

const encodeJson = (body) => ({
  method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" },
});

function toBase64(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

// --- display --------------------------------------------------------------------------------------------

export const isShown = (example) => example === shown;

/** Shows the first example large if it is not shown yet, and several ones as small pictures. */
export function showExamples(examples, box) {
  showList(examples);
  const [first] = examples;
  if (isShown(first)) return;
  const isItem = first.kind === "item";
  showPicture(addressOf(first), isItem ? `The item you are searching with: ${nameOf(first)}`
    : "The photo you are searching with", isItem ? null : box, !isItem);
  shown = first;
}

/** Hides the query; the next one is shown again, even if it is the same. */
export function hideQuery() {
  shown = null;
  element("query").hidden = true;
  showList([]);
}

function addressOf({ kind, picture, blob }) {
  if (kind === "item") return picture;
  if (!addresses.has(blob)) addresses.set(blob, URL.createObjectURL(blob));
  return addresses.get(blob);
}

function nameOf({ kind, id, title, name }) {
  if (kind === "item") return title || id;
  return kind === "example" ? name : "your photo";
}

function showPicture(url, description, box, hasParts) {
  element("query").hidden = !url;
  element("parts").hidden = !hasParts;
  element("frame").dataset.parts = hasParts ? "yes" : "";
  photo.alt = description;
  if (url) photo.src = url;
  showBox(box);
}

function showList(examples) {
  const list = element("query-examples");
  const focused = [...list.children].findIndex((node) => node.contains(document.activeElement));
  const button = focused < 0 ? "" : document.activeElement.className;
  list.replaceChildren(...(examples.length > 1 ? examples : []).map((example, _, all) => createExample(example, all)));
  element("query-examples-section").hidden = list.children.length === 0;
  if (focused < 0) return;
  const next = list.children[Math.min(focused, list.children.length - 1)];
  const usable = [...next?.querySelectorAll(":enabled:not([hidden])") ?? []];
  const target = usable.find(({ className }) => className === button) ?? usable[0];
  (target ?? element("results-title")).focus({ preventScroll: true });
}

function createExample(example, examples) {
  const node = cloneTemplate("query-example");
  const find = (selector) => node.querySelector(selector);
  const name = nameOf(example);
  const { unlike = false } = example;
  node.toggleAttribute("data-unlike", unlike);
  find("img").hidden = !addressOf(example);
  if (addressOf(example)) find("img").src = addressOf(example);
  find("img").alt = unlike ? `Unlike ${name}` : `Like ${name}`;
  const sign = find(".sign");
  sign.textContent = unlike ? "−" : "+";
  sign.title = unlike ? "Less like this" : "Like this";
  sign.setAttribute("aria-label", unlike ? `Like ${name} instead of unlike` : `Unlike ${name} instead of like`);
  sign.disabled = !unlike && examples.filter((other) => !other.unlike).length === 1;
  sign.addEventListener("click", () => {
    onChange(examples.map((other) => other === example ? { ...example, unlike: !unlike } : other));
  });
  find(".remove").setAttribute("aria-label", `Remove ${name}`);
  find(".remove").hidden = sign.disabled;
  find(".remove").addEventListener("click", () => onChange(examples.filter((other) => other !== example)));
  return node;
}

const photo = element("photo");
photo.addEventListener("load", () => {
  element("frame").style.setProperty("--ratio", photo.naturalWidth / photo.naturalHeight);
});
photo.addEventListener("error", () => { element("query").hidden = true; });
