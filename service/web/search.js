// The search: its state, its requests, and the URL and history that belong to it.

import { fetchJson } from "./api.js";
import { showBox } from "./box.js";
import { announce, element, showNotice } from "./dom.js";
import { showFilter } from "./filters.js";
import { formatFragment, NO_OPTIONS, PAGE_SIZE, parseFragment } from "./link.js";
import { showOptions } from "./options.js";
import {
  arrange, checkSize, encodeSearch, hideQuery, isSame, isShown, loadExamples, onExamplesChange, showExamples,
} from "./query.js";
import { appendResults, showLoading, showNoResults, showProblem, showResults } from "./results.js";

const NO_SEARCH = { examples: [], box: null, filter: {}, ...NO_OPTIONS, limit: PAGE_SIZE };
let search = NO_SEARCH;
let cursor = null;
let running = null; // the AbortController of the current request: a new request aborts it
let retryLast = () => {}; // repeats the request that failed last
let onSearched = () => {};
// Until the status is loaded only the service enforces the limits.
let gallery = { items: null, maxBytes: Infinity, maxExamples: Infinity };
const photos = new Map(); // uploaded since the page was loaded, for going back to them; a link cannot hold them

export function setGallery(items, { max_body_bytes: maxBytes, max_examples: maxExamples }) {
  gallery = { items, maxBytes, maxExamples };
}

/** Calls `callback` whenever the results of a search are shown, except for further pages. */
export function onSearch(callback) {
  onSearched = callback;
}

// --- user actions ---------------------------------------------------------------------------------------

function keepPhoto(blob) {
  const photoId = `${performance.timeOrigin}/${photos.size}`; // the history outlives a reload, the photos do not
  photos.set(photoId, blob);
  return { kind: "photo", blob, photoId };
}

const itemExample = ({ id, title, image }) => ({ kind: "item", id, title, picture: image.url });

export const searchPhoto = (blob) => start(keepPhoto(blob));

export const searchExample = (name) => start({ kind: "example", name });

/** Adds photos to the examples of the search. */
export const addPhotos = (blobs) => addExamples(blobs.map(keepPhoto));

/** What the buttons of a result do. */
const actions = {
  searchSimilar: (item) => start(itemExample(item)),
  like: (item) => addExamples([itemExample(item)]),
  unlike: (item) => addExamples([{ ...itemExample(item), unlike: true }]),
  hasVariants: ({ attributes }) => search.group !== "" && Object.hasOwn(attributes, search.group),
  showVariants({ attributes: { [search.group]: value } }) {
    const condition = Array.isArray(value) ? { all: value } : value;
    navigate({ filter: { ...search.filter, [search.group]: condition }, group: "" });
  },
};

function addExamples(added) {
  const kept = search.examples.filter((example) => !added.some((one) => isSame(one, example)));
  changeExamples([...kept, ...added]);
}

function changeExamples(changed) {
  if (changed.length > gallery.maxExamples) {
    showNotice(`A search combines up to ${gallery.maxExamples} examples. Remove one first.`);
    return;
  }
  const examples = arrange(changed);
  const box = examples[0] === search.examples[0] ? search.box : null;
  navigate({ examples, box });
}

/** Repeats the search with a change that going back undoes. */
function navigate(change) {
  element("item-dialog").close();
  showNotice("");
  search = { ...search, ...change, limit: PAGE_SIZE };
  updateHistory("pushState");
  window.scrollTo({ top: 0 });
  showFilter(search.filter);
  showOptions(search);
  if (search.examples.length) run(false);
  else showStart();
}

/** Repeats the search with another box, filter or options. */
export function refine(change) {
  showNotice("");
  search = { ...search, ...change, limit: PAGE_SIZE };
  updateHistory("replaceState");
  if (search.examples.length) run(false);
}

/** Loads the next page of the same search. */
export async function loadMore() {
  await runExclusive({ keep: true }, async (signal) => {
    element("results-section").setAttribute("aria-busy", "true");
    const results = await request({ limit: PAGE_SIZE, cursor }, signal);
    cursor = results.cursor;
    search = { ...search, limit: search.limit + PAGE_SIZE };
    updateHistory("replaceState");
    appendResults(results, actions);
  });
}

export const retry = () => retryLast();

/** Runs the search of the URL, when the page is opened and when the user goes back. */
export function restoreFromUrl() {
  reset();
  let areLost = false;
  try {
    const parsed = parseFragment(location.hash);
    const saved = history.state?.examples ?? parsed.examples;
    const kept = saved.filter(({ kind, photoId }) => kind !== "photo" || photos.has(photoId));
    areLost = kept.length < saved.length;
    const examples = kept.map((one) => one.kind === "photo" ? { ...one, blob: photos.get(one.photoId) } : one);
    search = { ...parsed, examples: arrange(examples), box: kept[0] === saved[0] ? parsed.box : null };
  } catch (error) {
    search = NO_SEARCH;
    hideQuery();
    showFilter(search.filter);
    showOptions(search);
    showProblem(error);
    return;
  }
  showFilter(search.filter);
  showOptions(search);
  if (search.examples.length) run(true);
  else showStart();
  if (areLost) showNotice("Photos are not kept after a reload. Please choose it again.");
}

/** Aborts the current search, so that its response cannot interfere with the next one. */
function reset() {
  running?.abort();
  element("item-dialog").close();
  showBox(null); // also cancels a search that an arrow key has scheduled
  showNotice("");
}

function start(example) {
  reset();
  search = { ...search, examples: [example], box: null, limit: PAGE_SIZE };
  updateHistory("pushState");
  window.scrollTo({ top: 0 });
  run(true);
}

function updateHistory(method) {
  const url = location.pathname + location.search + formatFragment(search);
  history[method]({ examples: search.examples.map(({ blob, ...saved }) => saved) }, "", url);
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
    if (!isShown(search.examples[0])) hideQuery(); // it shows the previous query
    showProblem(error, options);
  }
}

function run(isNew) {
  return runExclusive({}, async (signal) => {
    showLoading(isNew, search.limit);
    const hasUploads = search.examples.some(({ kind }) => kind === "photo");
    element("copy-link").hidden = hasUploads || !navigator.clipboard;
    await loadExamples(search.examples, signal);
    showExamples(search.examples, search.box);
    checkSize(search.examples, gallery.maxBytes);
    const results = await request({ limit: search.limit }, signal);
    cursor = results.cursor;
    showResults(formatTitle(search), results, actions);
    if (!results.items.length) explainNoResults();
    onSearched();
  });
}

async function request({ limit, cursor: after, ...options }, signal) {
  const { examples, box, filter, group, diversity } = search;
  const ranking = { ...(group && { group_by: group }), ...(diversity && { diversity }) };
  const encoded = await encodeSearch(examples, box, {
    limit, ...(Object.keys(filter).length && { filter }), ...(Object.keys(ranking).length && { ranking }),
    ...(after && { cursor: after }), ...options,
  });
  return fetchJson("v1/search", { ...encoded, signal });
}

/** Runs the current search with another ranking, or with null for none, without showing it. */
export async function searchWith(ranking, limit, signal) {
  await loadExamples(search.examples, signal);
  return request(ranking ? { ranking, limit, explain: true } : { ranking: {}, limit }, signal);
}

export const hasSearch = () => search.examples.length > 0;

function formatTitle({ examples, box }) {
  const [first] = examples;
  const unlike = examples.filter((example) => example.unlike).length;
  const like = examples.length - unlike;
  const title = like > 1 ? `Like ${like} examples`
    : first.kind === "item" ? `More like ${first.title || first.id}`
      : box ? "Closest to the selected part" : "Closest matches";
  return unlike ? `${title}, unlike ${unlike === 1 ? "another" : `${unlike} others`}` : title;
}

function explainNoResults() {
  const filtered = Object.keys(search.filter).length > 0;
  const reason = gallery.items === 0 ? "The gallery is empty."
    : filtered ? "No item matches all filters." : "The gallery has no other items.";
  showNoResults(reason, filtered && gallery.items !== 0);
}

function showStart() {
  document.body.className = "";
  document.title = "Lookalike";
  hideQuery();
  element("results-section").hidden = true;
}

onExamplesChange(changeExamples);

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
