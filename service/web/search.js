// The search: what is asked now, what it is asked with, and the address and history that go with it.

import { askBlob, askJson, Problem } from "./api.js";
import { showBox } from "./box.js";
import { announce, element, tell } from "./dom.js";
import { showFilter } from "./filters.js";
import { fragmentOf, PAGE, readFragment } from "./link.js";
import { showAnswer, showMore, showNothing, showProblem, showWaiting } from "./results.js";

// A query is {kind: "photo", blob}, {kind: "example", name} or {kind: "item", id}; the last two fit into a link.
const NOTHING = { query: null, box: null, filter: {}, top: PAGE };
let search = NOTHING;
let cursor = null;
let running = null; // the AbortController of the search under way: a new one replaces it
let again = () => {}; // what failed last, to be tried once more
let gallery = { items: null, maxBytes: Infinity }; // until the status has arrived the service alone refuses
const photos = new Map(); // given since the page was loaded, for the way back to them; a link cannot carry them

export function tellGallery(items, maxBytes) {
  gallery = { items, maxBytes };
}

// --- what a person may do -------------------------------------------------------------------------------

export function searchPhoto(blob) {
  const place = `${performance.timeOrigin}/${photos.size}`; // the history outlives a reload, the photos do not
  photos.set(place, blob);
  begin({ kind: "photo", blob, place });
}

export const searchExample = (name) => begin({ kind: "example", name });

export const searchLike = ({ id, title, image }) => begin({ kind: "item", id, title, picture: image.url });

/** The same query with another box or filter. */
export function refine(change) {
  tell("");
  search = { ...search, ...change, top: PAGE };
  remember("replaceState");
  if (search.query) run(false);
}

/** The next items of the same search. */
export async function more() {
  await guarded({ keep: true }, async (signal) => {
    element("answer").setAttribute("aria-busy", "true");
    const answer = await request({ ...search, top: PAGE, cursor }, signal);
    cursor = answer.cursor;
    search = { ...search, top: search.top + PAGE };
    remember("replaceState");
    showMore(answer, searchLike);
  });
}

export const retry = () => again();

/** The search that the address names, on arrival and on the way back. */
export function followAddress() {
  leave();
  try {
    search = readFragment(location.hash);
  } catch (error) {
    search = NOTHING;
    element("query").hidden = true;
    showFilter(search.filter);
    showProblem(error);
    return;
  }
  const place = history.state?.photo;
  if (photos.has(place)) search.query = { kind: "photo", blob: photos.get(place), place };
  showFilter(search.filter);
  if (search.query) run(true);
  else showStart();
  if (place && !search.query) tell("A reload forgets the photo: please choose it again.");
}

/** Ends what the last search may still do, so that it cannot come in between. */
function leave() {
  running?.abort();
  showBox(null); // with it goes an arrow key that waits to search
  tell("");
}

function begin(query) {
  leave();
  search = { ...search, query, box: null, top: PAGE };
  remember("pushState");
  window.scrollTo({ top: 0 });
  run(true);
}

function remember(how) {
  const address = location.pathname + location.search + fragmentOf(search);
  history[how]({ photo: search.query?.place }, "", address);
}

// --- asking ---------------------------------------------------------------------------------------------

/** Does `work` as the one search under way; what fails is shown unless another has taken its place. */
async function guarded(options, work) {
  running?.abort();
  const { signal } = running = new AbortController();
  try {
    await work(signal);
  } catch (error) {
    if (signal.aborted) return;
    again = () => guarded(options, work);
    if (!search.query.shown) element("query").hidden = true; // it shows what was asked before
    showProblem(error, options);
  }
}

function run(isNew) {
  return guarded({}, async (signal) => {
    showWaiting(isNew, search.top);
    element("share").hidden = search.query.kind === "photo" || !navigator.clipboard;
    await showQuery(signal);
    refuseLarge(search.query);
    const answer = await request(search, signal);
    cursor = answer.cursor;
    showAnswer(titleOf(search), answer, searchLike);
    if (!answer.items.length) explainNothing();
  });
}

async function request({ query, box, filter, top, cursor: after }, signal) {
  const bounds = { top, ...(Object.keys(filter).length && { filter }), ...(after && { cursor: after }) };
  if (query.kind === "item") {
    const body = JSON.stringify({ item_id: query.id, ...bounds });
    const headers = { "Content-Type": "application/json" };
    return askJson("v1/search", { method: "POST", body, headers, signal });
  }
  const form = new FormData();
  form.append("image", query.blob);
  if (box) form.append("box", box.join(","));
  for (const [name, value] of Object.entries(bounds)) {
    form.append(name, typeof value === "object" ? JSON.stringify(value) : value);
  }
  return askJson("v1/search", { method: "POST", body: form, signal });
}

function titleOf({ query, box }) {
  if (query.kind === "item") return `More like ${query.title || query.id}`;
  return box ? "Closest to this part" : "Closest matches";
}

function explainNothing() {
  const filtered = Object.keys(search.filter).length > 0;
  const why = gallery.items === 0 ? "The gallery is empty: its operator has to fill it first."
    : filtered ? "No item has everything that the filters ask for." : "The gallery has nothing else to compare with.";
  showNothing(why, filtered && gallery.items !== 0);
}

// --- showing the query ----------------------------------------------------------------------------------

/** Shows the query unless it is there: also when it was refined before it had arrived, or had failed to. */
async function showQuery(signal) {
  const { query } = search;
  if (query.shown) return;
  if (query.kind === "item") {
    await completeItem(query, signal);
    showPicture(query.picture, `The item you are searching with: ${query.title || query.id}`, false);
  } else {
    query.blob ??= await askBlob(`examples/${encodeURIComponent(query.name)}`, { signal });
    showPicture(URL.createObjectURL(query.blob), "The photo you are searching with", true);
  }
  query.shown = true;
}

function refuseLarge({ blob }) {
  if (!blob || blob.size <= gallery.maxBytes) return;
  throw new Problem({
    title: "The photo is too large",
    detail: `It has ${megabytes(blob.size)}; the limit is ${megabytes(gallery.maxBytes)}.`,
    remedy: "Choose a smaller one.", status: 413,
  });
}

/** A link names an item by its id alone: the service knows its title and picture, if it tells them with this key. */
async function completeItem(query, signal) {
  if (query.picture) return;
  try {
    const { title, images } = await askJson(`v1/items/${encodeURIComponent(query.id)}`, { signal });
    Object.assign(query, { title, picture: images[0]?.url });
  } catch (error) {
    if (![403, 404].includes(error.status)) throw error; // the search itself says if there is no such item
  }
}

function showPicture(address, description, hasParts) {
  const photo = element("photo");
  if (photo.src.startsWith("blob:")) URL.revokeObjectURL(photo.src);
  element("query").hidden = !address;
  element("parts").hidden = !hasParts;
  element("frame").dataset.parts = hasParts ? "yes" : "";
  photo.alt = description;
  if (address) photo.src = address;
  showBox(hasParts ? search.box : null);
}

function showStart() {
  document.body.className = "";
  document.title = "Lookalike";
  element("query").hidden = element("answer").hidden = true;
}

const megabytes = (bytes) => `${(bytes / 1024 ** 2).toFixed(1)} MB`;

const photo = element("photo");
photo.addEventListener("load", () => {
  element("frame").style.setProperty("--ratio", photo.naturalWidth / photo.naturalHeight);
});
photo.addEventListener("error", () => { element("query").hidden = true; });

element("share").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(location.href);
  } catch {
    tell("The browser did not let the page copy. The link is the address of this page.");
    return;
  }
  element("share").textContent = "Copied";
  announce("The link is copied.");
  setTimeout(() => { element("share").textContent = "Copy link"; }, 2000);
});
