// Checkboxes for the values of an attribute: the most frequent ones, or those that contain the text of a search box.

import { announce, cloneTemplate, heading, pluralize } from "./dom.js";
import { formatValue } from "./item.js";

const COLLAPSED_VALUES = 6; // shown until the list is expanded
const TYPING_MS = 250; // until a pause in typing starts a search

/** Creates the control of an attribute, with the functions that it calls.
 *
 * `onSelect` gets the checked values and whether an item must have all of them, `onSearch` the control whose text
 * changed. */
export function createChoices(facet, onSelect, onSearch) {
  const node = cloneTemplate("choices");
  node.dataset.name = facet.name;
  node.querySelector("legend").textContent = heading(facet.name);
  node.addEventListener("change", ({ target }) => {
    if (target.type === "checkbox") onSelect(checkedValues(node), node.querySelector(".match-all input").checked);
  });
  node.querySelector(".show-all").addEventListener("click", () => {
    const [first] = hiddenChips(node);
    node.dataset.expanded = "";
    update(node);
    first.querySelector("input").focus();
  });
  addSearch(node, facet.distinct, onSearch);
  showValues(node, facet);
  return node;
}

function addSearch(node, distinct, onSearch) {
  const box = node.querySelector("[type=search]");
  box.hidden = distinct <= COLLAPSED_VALUES + 1;
  box.placeholder = `Search ${pluralize(distinct, "value")}`;
  box.setAttribute("aria-label", `Search the values of ${heading(node.dataset.name)}`);
  let typing;
  box.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(async () => {
      await onSearch(node);
      if (searchText(node)) announce(noteOf(node) || `${pluralize(Number(node.dataset.shown), "value")} found.`);
    }, TYPING_MS);
  });
}

/** Returns the text that the values of a control are searched for. */
export const searchText = (node) => node.querySelector("[type=search]").value.trim();

/** Returns the values whose boxes are checked. */
export const checkedValues = (node) => [...node.querySelectorAll(".chip input:checked")]
  .map(({ value }) => JSON.parse(value));

/** Offers to ask for all checked values, which an item of a list has. */
export function offerAll(node) {
  node.dataset.lists = "yes";
  update(node);
}

/** Shows values with their counts, and the checked ones even if they are not among them. */
export function showValues(node, { values, distinct }) {
  const chips = node.querySelector(".chips");
  const known = new Map([...chips.children].map((chip) => [chip.querySelector("input").value, chip]));
  const listed = values.map(({ value, count }) => {
    const chip = known.get(JSON.stringify(value)) ?? createChip(value);
    known.delete(JSON.stringify(value));
    return setCount(chip, count);
  });
  const isComplete = !searchText(node) && distinct === values.length;
  const checked = [...known.values()].filter(isChecked).map((chip) => setCount(chip, isComplete ? 0 : null));
  replaceChips(chips, [...checked, ...listed]);
  Object.assign(node.dataset, { shown: values.length, distinct, searched: searchText(node), failed: "" });
  update(node);
}

/** Shows the values of all items without counts, because those of the filter or of the search cannot be loaded. */
export function showUncounted(node, { values, distinct }) {
  showValues(node, { values: values.map(({ value }) => ({ value, count: null })), distinct });
  if (!searchText(node)) return;
  node.dataset.failed = "yes";
  update(node);
}

/** Checks the boxes of these values, of which an item must have any or all. */
export function checkValues(node, wanted, all) {
  node.querySelector(".match-all input").checked = all;
  const texts = new Set(wanted.map((value) => JSON.stringify(value)));
  for (const box of node.querySelectorAll(".chip input")) box.checked = texts.delete(box.value);
  const missing = [...texts].map((text) => createChip(JSON.parse(text))); // too rare to be in the list
  for (const chip of missing) chip.querySelector("input").checked = true;
  node.querySelector(".chips").prepend(...missing);
  update(node);
}

const isChecked = (chip) => chip.querySelector("input").checked;

function createChip(value) {
  const node = cloneTemplate("chip");
  node.querySelector("input").value = JSON.stringify(value); // typed: 1, "1" and true are different values
  node.querySelector(".value").textContent = formatValue(value);
  return node;
}

function setCount(chip, count) {
  chip.querySelector(".count").textContent = count === null ? "" : count.toLocaleString();
  return chip;
}

/** Replaces the chips, unless they are the same; a focused one that is moved stays focused. */
function replaceChips(chips, wanted) {
  const focused = chips.contains(document.activeElement) ? document.activeElement : null;
  if (chips.children.length === wanted.length && wanted.every((chip, index) => chip === chips.children[index])) return;
  chips.replaceChildren(...wanted);
  if (focused) (chips.contains(focused) ? focused : chips.querySelector("input"))?.focus({ preventScroll: true });
}

// --- the end of the list --------------------------------------------------------------------------------

/** Returns the chips that the style sheet hides: all but the first few and the checked ones. */
const hiddenChips = (node) => node.querySelector(".chips").matches("[data-collapsed]")
  ? [...node.querySelector(".chips").children].slice(COLLAPSED_VALUES).filter((chip) => !isChecked(chip)) : [];

function update(node) {
  const { searched, expanded } = node.dataset;
  const chips = node.querySelector(".chips");
  chips.toggleAttribute("data-collapsed",
    expanded === undefined && !searched && chips.children.length > COLLAPSED_VALUES + 1);
  const count = hiddenChips(node).length;
  const unlisted = Number(node.dataset.distinct) - Number(node.dataset.shown);
  node.querySelector(".show-all").textContent = `${(count + unlisted).toLocaleString()} more`;
  node.querySelector(".show-all").hidden = count === 0;
  const note = count === 0 ? noteOf(node) : "";
  node.querySelector(".values-note").textContent = note;
  node.querySelector(".values-note").hidden = note === "";
  const all = node.querySelector(".match-all");
  all.hidden = !(all.querySelector("input").checked || (node.dataset.lists && checkedValues(node).length > 1));
  node.hidden = chips.children.length === 0 && !searched; // no item that matches the other filters has it
}

/** Returns why the list is not complete, or why it is empty. */
function noteOf({ dataset: { shown, distinct, searched, failed } }) {
  if (failed) return "The values cannot be searched now. Try again in a moment.";
  if (searched && distinct === "0") return `No value contains “${searched}”.`;
  if (shown === distinct) return "";
  const all = `The ${shown} most frequent of ${Number(distinct).toLocaleString()}`;
  return searched ? `${all} that contain “${searched}”.` : `${all} values. Search to find the others.`;
}
