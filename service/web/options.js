// Options of the order of the results: variants of a product as one result, and how much the results differ.

import { displayName, element } from "./dom.js";

/** Attributes whose name says that its value is the same for all variants of a product. */
const GROUPS = ["item_group_id", "parent", "parent_id", "product_group"];

const groups = element("group");
const slider = element("diversity");
let onChange = () => {};

export const isGroup = (name) => GROUPS.includes(name);

/** Calls `callback` with the options whenever the user has changed one. */
export function onOptionsChange(callback) {
  onChange = callback;
}

/** Offers attributes to group by: those of variants, or else any that several items have the same value of. */
export function offerGroups(facets) {
  const named = facets.filter(({ name }) => isGroup(name));
  const offered = named.length ? named : facets.filter(({ distinct, values: [most, ...others] }) => distinct > 1
    && most.count > 1 && [most, ...others].some(({ value }) => typeof value === "string"));
  replaceGroups(offered.map(({ name }) => name));
}

function replaceGroups(names) {
  const chosen = groups.value;
  groups.replaceChildren(new Option("No", ""), ...names.map((name) => new Option(`By ${displayName(name)}`, name)));
  showGroup(chosen);
}

/** Shows an attribute, also one of a link that is not offered. */
function showGroup(name) {
  if (![...groups.options].some(({ value }) => value === name)) groups.add(new Option(`By ${displayName(name)}`, name));
  groups.value = name;
  element("group-label").hidden = groups.options.length === 1;
}

export function showOptions({ group, diversity }) {
  showGroup(group);
  slider.value = diversity;
  showDiversity();
  element("option-count").textContent = Number(group !== "") + Number(diversity > 0) || "";
}

function showDiversity() {
  slider.setAttribute("aria-valuetext", `${Math.round(slider.valueAsNumber * 100)} %`);
}

function change() {
  const current = { group: groups.value, diversity: slider.valueAsNumber };
  showOptions(current);
  onChange(current);
}

groups.addEventListener("change", () => change());
slider.addEventListener("input", showDiversity);
slider.addEventListener("change", () => change());
