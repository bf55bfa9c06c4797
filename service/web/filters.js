// Filters for the gallery's attributes: checkboxes for values and ranges for numbers, combined into the JSON filter.

import { fetchJson } from "./api.js";
import { cloneTemplate, displayName, element } from "./dom.js";

const MAX_VALUES = 100; // per attribute
const COLLAPSED_VALUES = 6; // shown until the list is expanded
const MAX_UNIQUE_VALUES = 50; // an attribute with more values, each of one item, is a name and not a category

let filter = {};
let onChange = () => {};
let facets = [];

/** Calls `callback` with the filter whenever the user has changed it. */
export function onFilterChange(callback) {
  onChange = callback;
}

/** Loads and shows the attributes of a gallery; returns whether it succeeded.
 *
 * If the service does not provide them, the page has no filters. */
export async function loadFacets(gallery) {
  let loaded = [];
  try {
    loaded = (await fetchJson(`v1/facets?count=${MAX_VALUES}`, { background: true })).facets;
  } catch (error) {
    if (error.status === undefined) throw error;
    if (error.retryable) return false;
  }
  if (element("facets").contains(document.activeElement)) return false; // the user is editing a filter
  facets = loaded.filter((facet) => isUseful(facet, gallery));
  facets.sort((a, b) => rank(a) - rank(b) || a.distinct - b.distinct); // coarse categories first
  const controls = facets.map((facet) => isNumeric(facet) ? createRange(facet) : createChoices(facet));
  element("facets").replaceChildren(...controls);
  showFilter(filter);
  return true;
}

const isNumeric = ({ distinct, values }) => distinct > 1 && values.every(([value]) => typeof value === "number");

/** Orders categories first, then attributes that only some items have, then numbers. */
const rank = (facet) => isNumeric(facet) ? 2 : Number(facet.distinct === 1);

function isUseful({ distinct, values }, { items, index: { pending } }) {
  const [[value, count]] = values;
  if (distinct === 1) return count > 1 && count < items - pending; // useful only if some items lack it
  return !(distinct > MAX_UNIQUE_VALUES && count === 1 && typeof value === "string");
}

// --- attributes -----------------------------------------------------------------------------------------

const heading = (name) => name.charAt(0).toUpperCase() + displayName(name.slice(1));

function createChoices({ name, values }) {
  const node = cloneTemplate("choices");
  node.dataset.name = name;
  node.querySelector("legend").textContent = heading(name);
  const chips = node.querySelector(".chips");
  chips.append(...values.map(([value, count]) => createChip(name, value, count)));
  chips.toggleAttribute("data-collapsed", values.length > COLLAPSED_VALUES + 1);
  node.querySelector(".show-all").addEventListener("click", () => {
    const [first] = hiddenChips(chips);
    chips.removeAttribute("data-collapsed");
    updateShowAll(node);
    first.querySelector("input").focus();
  });
  return node;
}

/** Returns the chips that the style sheet hides: all but the first few and the checked ones. */
const hiddenChips = (chips) => chips.matches("[data-collapsed]")
  ? [...chips.children].slice(COLLAPSED_VALUES).filter((chip) => !chip.matches(":has(:checked)")) : [];

function updateShowAll(node) {
  const count = hiddenChips(node.querySelector(".chips")).length;
  node.querySelector(".show-all").textContent = `${count} more`;
  node.querySelector(".show-all").hidden = count === 0;
}

function createChip(name, value, count) {
  const node = cloneTemplate("chip");
  const box = node.querySelector("input");
  box.value = JSON.stringify(value); // typed: 1, "1" and true are different values
  node.querySelector(".value").textContent = typeof value === "boolean" ? (value ? "yes" : "no") : String(value);
  node.querySelector(".count").textContent = count === null ? "" : count.toLocaleString();
  box.addEventListener("change", () => {
    const checked = [...node.parentElement.querySelectorAll("input:checked")].map((input) => JSON.parse(input.value));
    setCondition(name, checked.length > 1 ? checked : checked[0]);
  });
  return node;
}

function createRange({ name, minimum, maximum }) {
  const node = cloneTemplate("range");
  node.dataset.name = name;
  node.querySelector("legend").textContent = heading(name);
  const inputs = [...node.querySelectorAll("input")];
  inputs[0].placeholder = Math.floor(minimum);
  inputs[1].placeholder = Math.ceil(maximum);
  for (const input of inputs) {
    input.addEventListener("change", () => {
      const filled = inputs.filter(({ value }) => value !== "");
      const bounds = filled.map(({ dataset, valueAsNumber }) => [dataset.bound, valueAsNumber]);
      setCondition(name, bounds.length ? Object.fromEntries(bounds) : undefined);
    });
  }
  return node;
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
    const isShown = node.matches(".range") ? showRange(node, condition) : showChoices(node, name, condition);
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

function showChoices(node, name, condition) {
  const wanted = condition === undefined || isObject(condition) ? [] : [condition].flat();
  const texts = new Set(wanted.map((value) => JSON.stringify(value)));
  for (const box of node.querySelectorAll("input")) {
    box.checked = texts.delete(box.value);
  }
  for (const text of texts) { // a value that is too rare to be in the list
    const rare = createChip(name, JSON.parse(text), null);
    rare.querySelector("input").checked = true;
    node.querySelector(".chips").prepend(rare);
  }
  updateShowAll(node);
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
