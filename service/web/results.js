// The results: cards, placeholders, empty results and errors.

import { Problem } from "./api.js";
import { showDetails } from "./details.js";
import { announce, cloneTemplate, element, pluralize } from "./dom.js";
import { createTitle, formatFact, formatPrice, isolate } from "./item.js";
import { isGroup } from "./options.js";

const results = element("results");
const groups = new Map(); // cards by the URL of their photo, which contains its digest

function setState(state) {
  document.body.className = `has-query ${state}`;
  element("results-section").hidden = false;
  element("results-section").setAttribute("aria-busy", String(state === "searching"));
  element("problem").hidden = state !== "failed";
  // If the focused element was hidden, move the focus here instead of to the top of the page.
  const focused = document.activeElement;
  const target = element(state === "failed" ? "problem" : "results-title");
  if (focused !== document.body && !focused.checkVisibility()) target.focus({ preventScroll: true });
}

function setTitle(text) {
  element("results-title").textContent = element("results-title").title = text;
  document.title = `${text} · Lookalike`;
}

/** Shows placeholders for a new query; the results fade while the same query is refined. */
export function showLoading(isNew, count) {
  announce("Searching");
  element("no-results").hidden = element("show-more").hidden = element("end-of-results").hidden = true;
  if (isNew) {
    // The focused button may be removed: move the focus to the heading instead of to the top of the page.
    if (results.contains(document.activeElement)) element("results-title").focus({ preventScroll: true });
    element("timings").textContent = "";
    setTitle("Searching…");
    results.replaceChildren(...Array.from({ length: count }, () => cloneTemplate("skeleton")));
  }
  setState("searching");
}

export function showResults(title, { items, cursor, milliseconds }, actions) {
  setTitle(title);
  if (results.contains(document.activeElement)) element("results-title").focus({ preventScroll: true });
  results.replaceChildren();
  groups.clear();
  for (const item of items) addCard(item, actions);
  const { decode, embed, search } = milliseconds;
  const stages = [["decode", decode], ["embed", embed], ["search", search]].filter(([, time]) => time > 0);
  element("timings").textContent = stages.map(([stage, time]) => `${stage} ${formatTime(time)}`).join(" · ");
  announce(items.length
    ? `${pluralize(items.length, "item")} found. The closest is ${items[0].title || items[0].id}.`
    : "No matches.");
  showPagination(cursor);
  setState("found");
}

/** Appends the next page and moves the focus to its first card. */
export function appendResults({ items, cursor }, actions) {
  const cards = items.map((item) => addCard(item, actions));
  announce(`${pluralize(items.length, "more item")}.`);
  showPagination(cursor);
  setState("found");
  cards.find((card) => !card.hidden)?.querySelector(".similar").focus({ preventScroll: true });
}

function showPagination(cursor) {
  const count = results.children.length;
  element("show-more").hidden = cursor === null;
  element("end-of-results").hidden = cursor !== null || count === 0;
  element("end-of-results").textContent = `End of results: ${pluralize(count, "item")}`;
}

export function showNoResults(reason, isFiltered) {
  element("no-results-reason").textContent = reason;
  element("no-results-clear").hidden = !isFiltered;
  element("no-results").hidden = false;
}

/** Shows an error; with `keep` the results stay, because only the next page failed. */
export function showProblem(error, { keep = false } = {}) {
  const problem = error instanceof Problem ? error : new Problem({
    title: "Error in the page", detail: String(error), remedy: "Reload the page.", status: 500,
  });
  announce("");
  if (!keep) {
    results.replaceChildren();
    element("timings").textContent = "";
    document.title = `${problem.title} · Lookalike`;
    element("no-results").hidden = element("show-more").hidden = element("end-of-results").hidden = true;
  }
  element("problem-title").textContent = problem.title;
  element("problem-detail").textContent = problem.detail;
  element("problem-remedy").textContent = problem.remedy;
  element("problem-id").textContent = problem.id ? `Request ${problem.id}` : "";
  element("retry").hidden = !problem.retryable;
  setState("failed");
  document.body.classList.toggle("keep-results", keep);
}

// --- cards ----------------------------------------------------------------------------------------------

/** Adds a result; one with the photo of an earlier one is collapsed behind it. */
function addCard(item, actions) {
  const card = createCard(item, actions);
  const group = groups.get(item.image.url);
  if (group) {
    group.at(-1).after(card);
    group.push(card);
    showGroup(group, group[0].querySelector(".same-photo").ariaExpanded === "true");
  } else {
    groups.set(item.image.url, [card]);
    results.append(card);
  }
  return card;
}

function showGroup(group, isExpanded) {
  const [first, ...others] = group;
  const button = first.querySelector(".same-photo");
  button.hidden = false;
  button.textContent = `${group.length} items with this photo`;
  button.ariaExpanded = String(isExpanded);
  for (const card of others) card.hidden = !isExpanded;
  for (const card of group) card.toggleAttribute("data-expanded", isExpanded);
}

function createCard(item, actions) {
  const node = cloneTemplate("result");
  const find = (selector) => node.querySelector(selector);
  const name = item.title || item.id;
  const { price, currency, ...others } = item.attributes;

  find("img").src = item.image.url;
  find(".similar").setAttribute("aria-label", `More like ${name}`);
  find(".similar").addEventListener("click", () => actions.searchSimilar(item));
  find(".like").setAttribute("aria-label", `Like ${name} too`);
  find(".like").addEventListener("click", () => actions.like(item));
  find(".unlike").setAttribute("aria-label", `Less like ${name}`);
  find(".unlike").addEventListener("click", () => actions.unlike(item));
  find(".title").append(createTitle(item));
  find(".title").title = name; // long titles are truncated, as are the facts
  const facts = Object.entries(others).filter(([attribute]) => !isGroup(attribute))
    .map((entry) => isolate(formatFact(entry)));
  find(".facts").append(...facts.flatMap((fact, index) => [index ? " · " : "", fact]));
  find(".facts").title = find(".facts").textContent;
  find(".price").textContent = formatPrice(price, currency);
  find(".details").setAttribute("aria-label", `Details of ${name}`);
  find(".details").addEventListener("click", () => showDetails(item, actions));
  find(".variants").hidden = !actions.hasVariants(item);
  find(".variants").setAttribute("aria-label", `All variants of ${name}`);
  find(".variants").addEventListener("click", () => actions.showVariants(item));
  find(".same-photo").addEventListener("click", ({ target }) => {
    showGroup(groups.get(item.image.url), target.ariaExpanded !== "true");
  });
  find(".fill").style.setProperty("--share", Math.min(Math.max(item.score, 0), 1));
  find(".score-value").textContent = item.score.toFixed(2);
  find(".score").title = "Cosine similarity of the two images; identical images have 1";
  return node;
}

const formatTime = (time) => `${time.toFixed(time < 10 ? 1 : 0)}\u00a0ms`;
