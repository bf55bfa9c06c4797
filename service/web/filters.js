// Filters for the gallery's attributes: checkboxes for values and ranges for numbers, combined into the JSON filter.

import { fetchJson } from "./api.js";
import {
  checkedValues, checkValues, createChoices, offerAll, searchText, showUncounted, showValues,
} from "./choices.js";
import { cloneTemplate, element, heading } from "./dom.js";
import { isGroup, offerGroups } from "./options.js";

const MAX_VALUES = 100; // per attribute
const MAX_UNIQUE_VALUES = 50; // an attribute with more values, each of one item, is a name and not a category
const MAX_ANSWERS = 100; // that are kept

let filter = {};
let onChange = () => {};
let facets = []; // of all items
const answers = new Map(); // promises of facets by their address, so that going back sends no request

/** Calls `callback` with the filter whenever the user has changed it. */
export function onFilterChange(callback) {
  onChange = callback;
}

/** Loads and shows the attributes of a gallery; returns whether it succeeded.
 *
 * If the service does not provide them, the page has no filters. */
export async function loadFacets(gallery) {
  let loaded = [];
  answers.clear();
  try {
    loaded = await loadAnswer(formatAddress({}));
  } catch (error) {
    if (error.status === undefined) throw error;
    if (error.retryable) return false;
  }
  if (element("facets").contains(document.activeElement)) return false; // the user is editing a filter
  offerGroups(loaded);
  facets = loaded.filter((facet) => isUseful(facet, gallery));
  facets.sort((a, b) => rank(a) - rank(b) || a.distinct - b.distinct); // coarse categories first
  const controls = facets.map((facet) => isNumeric(facet) ? createRange(facet)
    : createChoices(facet, (values, all) => setCondition(facet.name, conditionOf(values, all)), updateCounts));
  element("facets").replaceChildren(...controls);
  showFilter(filter);
  return true;
}

const conditionOf = (values, all) => values.length > 1 ? (all ? { all: values } : values) : values[0];

const isNumeric = ({ distinct, values }) => distinct > 1 && values.every(({ value }) => typeof value === "number");

/** Orders categories first, then attributes that only some items have, then numbers. */
const rank = (facet) => isNumeric(facet) ? 2 : Number(facet.distinct === 1);

function isUseful({ name, distinct, values }, { items, index: { pending } }) {
  const [{ value, count }] = values;
  if (isGroup(name)) return false;
  if (distinct === 1) return count > 1 && count < items - pending; // useful only if some items lack it
  return !(distinct > MAX_UNIQUE_VALUES && count === 1 && typeof value === "string");
}

// --- attributes -----------------------------------------------------------------------------------------

function formatAddress({ name, filter: condition = {}, contains }) {
  const options = new URLSearchParams({ limit: MAX_VALUES });
  if (name !== undefined) options.set("name", name);
  if (Object.keys(condition).length) options.set("filter", JSON.stringify(condition));
  if (contains) options.set("contains", contains);
  return `v1/facets?${options}`;
}

function loadAnswer(address) {
  if (!answers.has(address)) {
    if (answers.size === MAX_ANSWERS) answers.clear();
    const answer = fetchJson(address, { background: true }).then(({ facets: loaded }) => loaded);
    answers.set(address, answer);
    answer.catch(() => answers.delete(address));
  }
  return answers.get(address);
}

/** Returns the address of what a control shows: the items that match all conditions but its own.
 *
 * When an item must have all of its values, each further one is a further condition: then its own counts too. */
function addressOf(node) {
  const { name } = node.dataset;
  const { [name]: condition, ...rest } = filter;
  const others = isAll(condition) ? filter : rest;
  const contains = node.matches(".range") ? "" : searchText(node);
  // Attributes without a condition share one request.
  return formatAddress({ filter: others, ...((Object.hasOwn(filter, name) || contains) && { name }), contains });
}

/** Offers to ask for all checked values if an item with one of them has several values. */
async function detectLists(node) {
  const { name } = node.dataset;
  const checked = checkedValues(node);
  if (node.dataset.lists || checked.length < 2) return;
  try {
    const answers = await Promise.all(checked.slice(0, 2).map((value) => loadAnswer(
      formatAddress({ name, filter: { [name]: value } }),
    )));
    if (answers.some((found) => found.some(({ distinct }) => distinct > 1))) offerAll(node);
  } catch (error) {
    if (error.status === undefined) throw error; // else there is no switch until the next change
  }
}

/** Shows the values and counts under the current filter; without counts if they cannot be loaded. */
async function updateCounts(node) {
  const address = addressOf(node);
  const all = facets.find(({ name }) => name === node.dataset.name);
  let facet;
  try {
    facet = (await loadAnswer(address)).find(({ name }) => name === node.dataset.name);
  } catch (error) {
    if (error.status === undefined) throw error;
  }
  if (addressOf(node) !== address) return; // the filter or the text has changed meanwhile
  if (node.matches(".range")) showLimits(node, facet?.minimum == null ? all : facet);
  else if (facet) showValues(node, facet);
  else showUncounted(node, all);
}

function createRange({ name }) {
  const node = cloneTemplate("range");
  node.dataset.name = name;
  node.querySelector("legend").textContent = heading(name);
  const inputs = [...node.querySelectorAll("input")];
  for (const input of inputs) {
    input.addEventListener("change", () => {
      const filled = inputs.filter(({ value }) => value !== "");
      const bounds = filled.map(({ dataset, valueAsNumber }) => [dataset.bound, valueAsNumber]);
      setCondition(name, bounds.length ? Object.fromEntries(bounds) : undefined);
    });
  }
  return node;
}

function showLimits(node, { minimum, maximum }) {
  const [lower, upper] = node.querySelectorAll("input");
  lower.placeholder = Math.floor(minimum);
  upper.placeholder = Math.ceil(maximum);
}

function setCondition(name, condition) {
  const { [name]: _, ...rest } = filter;
  showFilter(condition === undefined ? rest : { ...rest, [name]: condition });
  onChange(filter);
}

// --- filter ---------------------------------------------------------------------------------------------

/** Shows a filter. It may come from a link and have conditions that no control can show. */
export function showFilter(newFilter) {
  filter = newFilter;
  const others = { ...filter };
  for (const node of element("facets").children) {
    const { name } = node.dataset;
    const condition = Object.hasOwn(filter, name) ? filter[name] : undefined; // an attribute may be named "constructor"
    const isShown = node.matches(".range") ? showRange(node, condition) : showChoices(node, condition);
    updateCounts(node);
    if (isShown) delete others[name];
  }
  const count = Object.keys(filter).length;
  element("filter-count").textContent = count || "";
  element("clear-filters").hidden = count === 0;
  element("other-conditions").hidden = Object.keys(others).length === 0;
  element("other-conditions-text").textContent = JSON.stringify(others);
  element("filters").hidden = facets.length === 0 && count === 0;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

const isAll = (condition) => isObject(condition) && Array.isArray(condition.all);

function showChoices(node, condition) {
  const wanted = isAll(condition) ? condition.all : condition === undefined || isObject(condition) ? []
    : [condition].flat();
  checkValues(node, wanted, isAll(condition));
  detectLists(node);
  return wanted.length > 0;
}

function showRange(node, condition) {
  const bounds = isObject(condition) ? condition : {};
  for (const input of node.querySelectorAll("input")) {
    input.value = bounds[input.dataset.bound] ?? "";
  }
  return Object.keys(bounds).length > 0 && Object.keys(bounds).every((bound) => bound === "gte" || bound === "lte");
}

export function clearFilter() {
  showFilter({});
  onChange(filter);
}

element("clear-filters").addEventListener("click", () => {
  element("filters").querySelector("summary").focus();
  clearFilter();
});
