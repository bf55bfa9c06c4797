// Filters made of the gallery's attributes: values to tick, spans of numbers; together the JSON filter of a search.

import { askJson } from "./api.js";
import { copyOf, element, spoken } from "./dom.js";

const MOST_VALUES = 100;
const FEW = 6; // values shown before somebody asks for all
const NAMES_BEYOND = 50; // an attribute with more values than this, each of one item, names items rather than groups

let filter = {};
let changed = () => {};
let facets = [];

/** Calls `told` with the filter whenever a person has changed it. */
export function onFilter(told) {
  changed = told;
}

/** Shows the attributes of a gallery as they are now, and answers whether it could.
 *
 * A service that tells none of them simply has no filters on its page. */
export async function loadFacets(gallery) {
  let told = [];
  try {
    told = (await askJson(`v1/facets?count=${MOST_VALUES}`, { background: true })).facets;
  } catch (error) {
    if (error.status === undefined) throw error;
    if (error.passing) return false;
  }
  if (element("facets").contains(document.activeElement)) return false; // somebody is at it
  facets = told.filter((facet) => isUseful(facet, gallery));
  facets.sort((one, other) => rank(one) - rank(other) || one.distinct - other.distinct); // coarse groups first
  element("facets").replaceChildren(...facets.map((facet) => isSpan(facet) ? range(facet) : choices(facet)));
  showFilter(filter);
  return true;
}

const isSpan = ({ distinct, values }) => distinct > 1 && values.every(([value]) => typeof value === "number");

/** Groups, then what some items have and others lack, then spans of numbers. */
const rank = (facet) => isSpan(facet) ? 2 : Number(facet.distinct === 1);

function isUseful({ distinct, values }, { items, index: { pending } }) {
  const [[value, count]] = values;
  if (distinct === 1) return count > 1 && count < items - pending; // what all have is no choice, what some have is one
  return !(distinct > NAMES_BEYOND && count === 1 && typeof value === "string");
}

// --- one attribute --------------------------------------------------------------------------------------

const heading = (name) => name.charAt(0).toUpperCase() + spoken(name.slice(1));

function choices({ name, values }) {
  const node = copyOf("choices");
  node.dataset.name = name;
  node.querySelector("legend").textContent = heading(name);
  const chips = node.querySelector(".chips");
  chips.append(...values.map(([value, count]) => chip(name, value, count)));
  chips.toggleAttribute("data-folded", values.length > FEW + 1);
  node.querySelector(".all").addEventListener("click", () => {
    const [first] = folded(chips);
    chips.removeAttribute("data-folded");
    tellFolded(node);
    first.querySelector("input").focus();
  });
  return node;
}

/** The chips that are out of sight, as the style sheet has it: all but the first few and the ticked ones. */
const folded = (chips) => chips.matches("[data-folded]")
  ? [...chips.children].slice(FEW).filter((it) => !it.matches(":has(:checked)")) : [];

function tellFolded(node) {
  const count = folded(node.querySelector(".chips")).length;
  node.querySelector(".all").textContent = `${count} more`;
  node.querySelector(".all").hidden = count === 0;
}

function chip(name, value, count) {
  const node = copyOf("chip");
  const box = node.querySelector("input");
  box.value = JSON.stringify(value); // typed: 1, "1" and true are different values
  node.querySelector(".value").textContent = typeof value === "boolean" ? (value ? "yes" : "no") : String(value);
  node.querySelector(".tally").textContent = count === null ? "" : count.toLocaleString();
  box.addEventListener("change", () => {
    const ticked = [...node.parentElement.querySelectorAll("input:checked")].map((it) => JSON.parse(it.value));
    change(name, ticked.length > 1 ? ticked : ticked[0]);
  });
  return node;
}

function range({ name, minimum, maximum }) {
  const node = copyOf("range");
  node.dataset.name = name;
  node.querySelector("legend").textContent = heading(name);
  const inputs = [...node.querySelectorAll("input")];
  inputs[0].placeholder = Math.floor(minimum);
  inputs[1].placeholder = Math.ceil(maximum);
  for (const input of inputs) {
    input.addEventListener("change", () => {
      const given = inputs.filter((it) => it.value !== "").map((it) => [it.dataset.bound, it.valueAsNumber]);
      change(name, given.length ? Object.fromEntries(given) : undefined);
    });
  }
  return node;
}

function change(name, condition) {
  const { [name]: _, ...rest } = filter;
  showFilter(condition === undefined ? rest : { ...rest, [name]: condition });
  changed(filter);
}

// --- the whole ------------------------------------------------------------------------------------------

/** Brings the panel in line with a filter, which may come from a link and say more than the panel can. */
export function showFilter(given) {
  filter = given;
  const beyond = { ...filter };
  for (const node of element("facets").children) {
    const { name } = node.dataset;
    const condition = Object.hasOwn(filter, name) ? filter[name] : undefined; // "constructor" is an attribute too
    const told = node.matches(".range") ? tellRange(node, condition) : tick(node, name, condition);
    if (told) delete beyond[name];
  }
  const count = Object.keys(filter).length;
  element("filter-count").textContent = count || "";
  element("clear").hidden = count === 0;
  element("beyond").hidden = Object.keys(beyond).length === 0;
  element("beyond-text").textContent = JSON.stringify(beyond);
  element("filters").hidden = facets.length === 0 && count === 0;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

function tick(node, name, condition) {
  const wanted = condition === undefined || isObject(condition) ? [] : [condition].flat();
  const texts = new Set(wanted.map((value) => JSON.stringify(value)));
  for (const box of node.querySelectorAll("input")) {
    box.checked = texts.delete(box.value);
  }
  for (const text of texts) { // a value that is too rare to be listed
    const rare = chip(name, JSON.parse(text), null);
    rare.querySelector("input").checked = true;
    node.querySelector(".chips").prepend(rare);
  }
  tellFolded(node);
  return wanted.length > 0;
}

function tellRange(node, condition) {
  const bounds = isObject(condition) ? condition : {};
  for (const input of node.querySelectorAll("input")) {
    input.value = bounds[input.dataset.bound] ?? "";
  }
  return Object.keys(bounds).length > 0 && Object.keys(bounds).every((bound) => bound === "gte" || bound === "lte");
}

export function clearFilter() {
  showFilter({});
  changed(filter);
}

element("clear").addEventListener("click", () => {
  element("filters").querySelector("summary").focus();
  clearFilter();
});
