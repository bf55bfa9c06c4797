// Ranking rules, for operators: the current query in the order of its similarity and in the order of the rules.

import { fetchJson, Problem } from "./api.js";
import { announce, cloneTemplate, element } from "./dom.js";
import { hasSearch, onSearch, searchWith } from "./search.js";

const SHOWN = 12; // items of each order
const MIN_LIMIT = 100; // more than the service's default window
const MAX_LIMIT = 1000;
const EXAMPLE = { boosts: [{ weight: 0.1, filter: { in_stock: true } }], diversity: 0.2 };

const panel = element("rankings");
const rules = element("rankings-rules");
const name = element("rankings-name");
const stored = new Map(); // the newest version of each ranking by its name
let running = null; // the AbortController of the current preview
let isLoaded = false;

/** Shows the panel to those who may store rankings. */
export function showRankings(isPermitted) {
  panel.hidden = !isPermitted;
}

// --- stored rankings ------------------------------------------------------------------------------------

async function loadStored(chosen) {
  const { rankings } = await fetchJson("v1/rankings");
  stored.clear();
  for (const ranking of rankings) stored.set(ranking.name, ranking);
  element("rankings-stored").replaceChildren(
    new Option("New rules", ""),
    ...rankings.map((one) => new Option(`${one.name} · version ${one.version}`, one.name)),
  );
  element("rankings-stored").value = chosen;
}

element("rankings-stored").addEventListener("change", ({ target }) => {
  const ranking = stored.get(target.value)?.ranking;
  rules.value = formatRules(ranking ?? EXAMPLE);
  name.value = target.value;
  preview();
});

/** Formats rules without empty parts. */
const formatRules = (ranking) => JSON.stringify(ranking, (_, value) => isEmpty(value) ? undefined : value, 2);

const isEmpty = (value) => value === null || (typeof value === "object" && Object.values(value).every(isEmpty));

async function save() {
  const body = JSON.stringify(readRules());
  const wanted = name.value;
  const known = element("rankings-stored").value === wanted ? stored.get(wanted) : undefined;
  // Only the version that was loaded into the editor is replaced, so that nobody's change is lost.
  const condition = known ? { "If-Match": `"${known.version}"` } : { "If-None-Match": "*" };
  const headers = { "Content-Type": "application/json", ...condition };
  try {
    const { version } = await fetchJson(`v1/rankings/${encodeURIComponent(wanted)}`, { method: "PUT", body, headers });
    await loadStored(wanted);
    element("rankings-state").textContent = `Stored as ${wanted}, version ${version}.`;
    announce(element("rankings-state").textContent);
  } catch (error) {
    if (error.status !== 412) throw error;
    await loadStored("");
    throw new Problem({
      status: 412, title: "Not stored", detail: `There is a ranking ${wanted} that is not the one you loaded.`,
      remedy: "Load it to see its rules, or store yours under another name.",
    });
  }
}

// --- preview --------------------------------------------------------------------------------------------

function readRules() {
  try {
    return JSON.parse(rules.value);
  } catch (error) {
    rules.focus();
    throw new SyntaxError(`The rules are not JSON: ${error.message}`);
  }
}

/** Runs `work`, of which the last call counts, and shows what went wrong. */
async function attempt(work) {
  running?.abort();
  const { signal } = running = new AbortController();
  element("rankings-problem").textContent = element("rankings-state").textContent = "";
  panel.setAttribute("aria-busy", "true");
  try {
    await work(signal);
  } catch (error) {
    if (signal.aborted) return;
    const isExpected = error.status !== undefined || error instanceof SyntaxError;
    element("rankings-problem").textContent = error.status === undefined ? error.message
      : `${error.detail} ${error.remedy}`;
    if (!isExpected) throw error;
  }
  panel.setAttribute("aria-busy", "false");
}

const preview = () => attempt(async (signal) => {
  if (!isLoaded) await loadStored("");
  isLoaded = true;
  const ranking = readRules();
  if (!hasSearch()) return;
  // All candidates of the first window, so that an item that is missing from them was hidden or grouped.
  const pins = Array.isArray(ranking.pin) ? ranking.pin.length : 0;
  const limit = Math.min(MAX_LIMIT, Math.max(MIN_LIMIT, ranking.window || 0) + pins);
  const [before, after] = await Promise.all([null, ranking].map((one) => searchWith(one, limit, signal)));
  showOrders(before.items, after.items, ranking);
  announce("The two orders are shown.");
});

function showOrders(before, after, ranking) {
  element("rankings-preview").hidden = false;
  const [places, newPlaces] = [before, after].map((items) => new Map(items.map(({ id }, index) => [id, index + 1])));
  const groups = new Set(after.map((item) => groupOf(item, ranking.group_by)).filter(Boolean));
  element("rankings-before").replaceChildren(...before.slice(0, SHOWN).map((item, index) => {
    const node = createEntry(item, index + 1);
    const place = newPlaces.get(item.id);
    const gone = groups.has(groupOf(item, ranking.group_by)) ? "grouped" : "hidden";
    setMovement(node, place ? movement(index + 1, place) : { text: gone, kind: gone });
    node.querySelector(".shares").textContent = `similarity ${item.score.toFixed(3)}`;
    return node;
  }));
  element("rankings-after").replaceChildren(...after.slice(0, SHOWN).map((item, index) => {
    const { reason, detail, ...explanation } = item.explanation;
    const node = createEntry(item, index + 1);
    setMovement(node, reason === "pinned" ? { text: "pinned", kind: "pinned" }
      : movement(places.get(item.id) ?? explanation.similarity_place, index + 1));
    node.querySelector(".shares").textContent = formatScore(explanation);
    node.querySelector(".reason").textContent = detail;
    return node;
  }));
}

/** Returns a text that is equal for the items of a group; undefined for an item that is in none. */
function groupOf({ attributes }, name) {
  if (!name || !Object.hasOwn(attributes, name)) return undefined;
  return JSON.stringify([attributes[name]].flat().sort());
}

function movement(before, after) {
  if (!before) return { text: "new", kind: "up" };
  const steps = before - after;
  if (!steps) return { text: "=", kind: "same", label: "same place" };
  return steps > 0 ? { text: `▲${steps}`, kind: "up", label: `up ${steps}` }
    : { text: `▼${-steps}`, kind: "down", label: `down ${-steps}` };
}

function setMovement(node, { text, kind, label }) {
  const mark = node.querySelector(".movement");
  mark.textContent = text;
  mark.dataset.kind = kind;
  if (label) Object.assign(mark, { role: "img", ariaLabel: label });
}

function createEntry({ id, title, image }, place) {
  const node = cloneTemplate("ranked");
  node.dataset.id = id;
  node.querySelector(".place").textContent = place;
  node.querySelector("img").src = image.url;
  node.querySelector(".ranked-title").textContent = title || id;
  return node;
}

/** Formats the sum that is the score: the similarity and the share of each rule. */
function formatScore({ similarity, shares, score }) {
  const acting = shares.filter(({ share }) => share !== 0);
  if (!acting.length) return `similarity ${similarity.toFixed(3)}`;
  const parts = acting.map(({ rule, share }) => `${share < 0 ? "−" : "+"} ${Math.abs(share).toFixed(3)} ${rule}`);
  return [`similarity ${similarity.toFixed(3)}`, ...parts, `= ${score.toFixed(3)}`].join(" ");
}

// --- events ---------------------------------------------------------------------------------------------

panel.addEventListener("toggle", () => {
  if (!panel.open) return;
  if (!rules.value) rules.value = formatRules(EXAMPLE);
  preview();
});
element("rankings-form").addEventListener("submit", (event) => {
  event.preventDefault();
  preview();
});
element("rankings-save").addEventListener("click", () => {
  name.required = true;
  if (element("rankings-form").reportValidity()) attempt(save);
  name.required = false;
});
onSearch(() => { if (panel.open && panel.checkVisibility()) preview(); });
