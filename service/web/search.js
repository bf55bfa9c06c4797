// The search: its state, its requests, and the URL and history that belong to it.

import { fetchBlob, fetchJson, Problem } from "./api.js";
import { showBox } from "./box.js";
import { announce, element, showNotice } from "./dom.js";
import { showFilter } from "./filters.js";
import { formatFragment, PAGE_SIZE, parseFragment } from "./link.js";
import { appendResults, showLoading, showNoResults, showProblem, showResults } from "./results.js";

// A query is {kind: "photo", blob}, {kind: "example", name} or {kind: "item", id}; a link can hold the last two.
const NO_SEARCH = { query: null, box: null, filter: {}, limit: PAGE_SIZE };
let search = NO_SEARCH;
let cursor = null;
let running = null; // the AbortController of the current request: a new request aborts it
let retryLast = () => {}; // repeats the request that failed last
let gallery = { items: null, maxBytes: Infinity }; // until the status is loaded only the service enforces the limit
const photos = new Map(); // uploaded since the page was loaded, for going back to them; a link cannot hold them

export function setGallery(items, maxBytes) {
  gallery = { items, maxBytes };
}

// --- user actions ---------------------------------------------------------------------------------------

export function searchPhoto(blob) {
  const photoId = `${performance.timeOrigin}/${photos.size}`; // the history outlives a reload, the photos do not
  photos.set(photoId, blob);
  start({ kind: "photo", blob, photoId });
}

export const searchExample = (name) => start({ kind: "example", name });

export const searchSimilar = ({ id, title, image }) => start({ kind: "item", id, title, picture: image.url });

/** Repeats the search with another box or filter. */
export function refine(change) {
  showNotice("");
  search = { ...search, ...change, limit: PAGE_SIZE };
  updateHistory("replaceState");
  if (search.query) run(false);
}

/** Loads the next page of the same search. */
export async function loadMore() {
  await runExclusive({ keep: true }, async (signal) => {
    element("results-section").setAttribute("aria-busy", "true");
    const results = await request({ ...search, limit: PAGE_SIZE, cursor }, signal);
    cursor = results.cursor;
    search = { ...search, limit: search.limit + PAGE_SIZE };
    updateHistory("replaceState");
    appendResults(results, searchSimilar);
  });
}

export const retry = () => retryLast();

/** Runs the search of the URL, when the page is opened and when the user goes back. */
export function restoreFromUrl() {
  reset();
  try {
    search = parseFragment(location.hash);
  } catch (error) {
    search = NO_SEARCH;
    element("query").hidden = true;
    showFilter(search.filter);
    showProblem(error);
    return;
  }
  const photoId = history.state?.photo;
  if (photos.has(photoId)) search.query = { kind: "photo", blob: photos.get(photoId), photoId };
  showFilter(search.filter);
  if (search.query) run(true);
  else showStart();
  if (photoId && !search.query) showNotice("Photos are not kept after a reload. Please choose it again.");
}

/** Aborts the current search, so that its response cannot interfere with the next one. */
function reset() {
  running?.abort();
  element("item-dialog").close();
  showBox(null); // also cancels a search that an arrow key has scheduled
  showNotice("");
}

function start(query) {
  reset();
  search = { ...search, query, box: null, limit: PAGE_SIZE };
  updateHistory("pushState");
  window.scrollTo({ top: 0 });
  run(true);
}

function updateHistory(method) {
  const url = location.pathname + location.search + formatFragment(search);
  history[method]({ photo: search.query?.photoId }, "", url);
}

// --- requests--------------------------------------------------------------------------------------------

/** Runs `work` and aborts whatever ran before; an error is shown unless `work` itself was aborted. */
async function runExclusive(options, work) {
  running?.abort();
  const { signal } = running = new AbortController();
  try {
    await work(signal);
  } catch (error) {
    if (signal.aborted) return;
    retryLast = () => runExclusive(options, work);
    if (!search.query.shown) element("query").hidden = true; // it shows the previous query
    showProblem(error, options);
  }
}

function run(isNew) {
  return runExclusive({}, async (signal) => {
    showLoading(isNew, search.limit);
    element("copy-link").hidden = search.query.kind === "photo" || !navigator.clipboard;
    await showQuery(signal);
    checkSize(search.query);
    const results = await request(search, signal);
    cursor = results.cursor;
    showResults(formatTitle(search), results, searchSimilar);
    if (!results.items.length) explainNoResults();
  });
}

async function request({ query, box, filter, limit, cursor: after }, signal) {
  const options = { limit, ...(Object.keys(filter).length && { filter }), ...(after && { cursor: after }) };
  if (query.kind === "item") {
    const body = JSON.stringify({ item_id: query.id, ...options });
    const headers = { "Content-Type": "application/json" };
    return fetchJson("v1/search", { method: "POST", body, headers, signal });
  }
  const form = new FormData();
  form.append("image", query.blob);
  if (box) form.append("box", box.join(","));
  for (const [name, value] of Object.entries(options)) {
    form.append(name, typeof value === "object" ? JSON.stringify(value) : value);
  }
  return fetchJson("v1/search", { method: "POST", body: form, signal });
}

function formatTitle({ query, box }) {
  if (query.kind === "item") return `More like ${query.title || query.id}`;
  return box ? "Closest to the selected part" : "Closest matches";
}

function explainNoResults() {
  const filtered = Object.keys(search.filter).length > 0;
  const reason = gallery.items === 0 ? "The gallery is empty."
    : filtered ? "No item matches all filters." : "The gallery has no other items.";
  showNoResults(reason, filtered && gallery.items !== 0);
}

// --- display of the query -------------------------------------------------------------------------------

/** Shows the photo or item of the query if it is not shown yet, for example because loading it failed before. */
async function showQuery(signal) {
  const { query } = search;
  if (query.shown) return;
  if (query.kind === "item") {
    await completeItem(query, signal);
    showPicture(query.picture, `The item you are searching with: ${query.title || query.id}`, false);
  } else {
    query.blob ??= await fetchBlob(`examples/${encodeURIComponent(query.name)}`, { signal });
    showPicture(URL.createObjectURL(query.blob), "The photo you are searching with", true);
  }
  query.shown = true;
}

function checkSize({ blob }) {
  if (!blob || blob.size <= gallery.maxBytes) return;
  throw new Problem({
    title: "The photo is too large",
    detail: `It has ${megabytes(blob.size)}; the limit is ${megabytes(gallery.maxBytes)}.`,
    remedy: "Choose a smaller one.", status: 413,
  });
}

/** Loads title and picture of an item, of which a link has only the id, if the key permits it. */
async function completeItem(query, signal) {
  if (query.picture) return;
  try {
    const { title, images } = await fetchJson(`v1/items/${encodeURIComponent(query.id)}`, { signal });
    Object.assign(query, { title, picture: images[0]?.url });
  } catch (error) {
    if (![403, 404].includes(error.status)) throw error; // the search itself reports an unknown item
  }
}

function showPicture(url, description, hasParts) {
  const photo = element("photo");
  if (photo.src.startsWith("blob:")) URL.revokeObjectURL(photo.src);
  element("query").hidden = !url;
  element("parts").hidden = !hasParts;
  element("frame").dataset.parts = hasParts ? "yes" : "";
  photo.alt = description;
  if (url) photo.src = url;
  showBox(hasParts ? search.box : null);
}

function showStart() {
  document.body.className = "";
  document.title = "Lookalike";
  element("query").hidden = element("results-section").hidden = true;
}

const megabytes = (bytes) => `${(bytes / 1024 ** 2).toFixed(1)} MB`;

const photo = element("photo");
photo.addEventListener("load", () => {
  element("frame").style.setProperty("--ratio", photo.naturalWidth / photo.naturalHeight);
});
photo.addEventListener("error", () => { element("query").hidden = true; });

element("copy-link").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(location.href);
  } catch {
    showNotice("The browser blocked copying. Copy the address of this page instead.");
    return;
  }
  element("copy-link").textContent = "Copied";
  announce("Link copied.");
  setTimeout(() => { element("copy-link").textContent = "Copy link"; }, 2000);
});
