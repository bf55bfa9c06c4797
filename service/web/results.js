// What came back: cards, and what to say while there are none.

import { Problem } from "./api.js";
import { announce, copyOf, counted, element, spoken } from "./dom.js";

const results = element("results");

function setState(state) {
  document.body.className = `asked ${state}`;
  element("answer").hidden = false;
  element("answer").setAttribute("aria-busy", String(state === "searching"));
  element("problem").hidden = state !== "failed";
  // What was pressed may be out of sight now: the keyboard continues from here, not from the top of the page.
  const held = document.activeElement;
  const here = element(state === "failed" ? "problem" : "answer-title");
  if (held !== document.body && !held.checkVisibility()) here.focus({ preventScroll: true });
}

function setTitle(text) {
  element("answer-title").textContent = element("answer-title").title = text;
  document.title = `${text} · Lookalike`;
}

/** Placeholders for a new query; what is there fades while the same query is refined. */
export function showWaiting(isNew, count) {
  announce("Searching");
  element("nothing").hidden = element("more").hidden = element("all").hidden = true;
  if (isNew) {
    // The button that asked may be about to go: the keyboard continues from the heading, not from the top.
    if (results.contains(document.activeElement)) element("answer-title").focus({ preventScroll: true });
    element("times").textContent = "";
    setTitle("Searching…");
    results.replaceChildren(...Array.from({ length: count }, () => copyOf("skeleton")));
  }
  setState("searching");
}

export function showAnswer(title, { items, cursor, milliseconds }, onLike) {
  setTitle(title);
  results.replaceChildren(...items.map((item) => card(item, onLike)));
  const { decode, embed, search } = milliseconds;
  const took = [["decode", decode], ["embed", embed], ["search", search]].filter(([, time]) => time > 0);
  element("times").textContent = took.map(([what, time]) => `${what} ${short(time)}`).join(" · ");
  announce(items.length
    ? `${counted(items.length, "item")} found. The closest is ${items[0].title || items[0].id}.`
    : "Nothing matches.");
  showRest(cursor);
  setState("found");
}

/** Adds the next page, and brings the keyboard to its first card. */
export function showMore({ items, cursor }, onLike) {
  const cards = items.map((item) => card(item, onLike));
  results.append(...cards);
  announce(`${counted(items.length, "more item")}.`);
  showRest(cursor);
  setState("found");
  cards[0]?.querySelector(".like").focus({ preventScroll: true });
}

function showRest(cursor) {
  const shown = results.children.length;
  element("more").hidden = cursor === null;
  element("all").hidden = cursor !== null || shown === 0;
  element("all").textContent = `That is all: ${counted(shown, "item")}.`;
}

export function showNothing(why, isFiltered) {
  element("nothing-why").textContent = why;
  element("unfilter").hidden = !isFiltered;
  element("nothing").hidden = false;
}

/** Tells what went wrong; cards that are there stay when only the next ones are missing. */
export function showProblem(error, { keep = false } = {}) {
  const problem = error instanceof Problem ? error : new Problem({
    title: "The page failed", detail: String(error), remedy: "Load it again.", status: 500,
  });
  announce("");
  if (!keep) {
    results.replaceChildren();
    element("times").textContent = "";
    document.title = `${problem.title} · Lookalike`;
    element("nothing").hidden = element("more").hidden = element("all").hidden = true;
  }
  element("problem-title").textContent = problem.title;
  element("problem-detail").textContent = problem.detail;
  element("problem-remedy").textContent = problem.remedy;
  element("problem-id").textContent = problem.id ? `Request ${problem.id}` : "";
  element("again").hidden = !problem.passing;
  setState("failed");
  document.body.classList.toggle("kept", keep);
}

// --- one card -------------------------------------------------------------------------------------------

function card(item, onLike) {
  const node = copyOf("result");
  const find = (selector) => node.querySelector(selector);
  const name = item.title || item.id;
  const { price, currency, ...others } = item.attributes;

  find("img").src = item.image.url;
  find(".like").setAttribute("aria-label", `More like ${name}`);
  find(".like").addEventListener("click", () => onLike(item));
  find(".title").append(titleOf(item, name));
  find(".title").title = name; // a long one is cut off, as are the facts
  find(".facts").append(...Object.entries(others).flatMap((it, place) => [place ? " · " : "", isolated(fact(it))]));
  find(".facts").title = find(".facts").textContent;
  find(".price").textContent = priceOf(price, currency);
  find(".fill").style.setProperty("--share", Math.min(Math.max(item.score, 0), 1));
  find(".number").textContent = item.score.toFixed(2);
  find(".score").title = "Likeness: the cosine of the two pictures' vectors; 1 is the same picture";
  return node;
}

function titleOf(item, name) {
  // Only web addresses become links: a catalogue is data, and "javascript:" is an address too.
  if (!/^https?:\/\//i.test(item.url)) return document.createTextNode(name);
  const link = document.createElement("a");
  Object.assign(link, { href: item.url, textContent: name, target: "_blank", rel: "noopener noreferrer" });
  return link;
}

/** A text that may run from right to left, without turning its neighbours around. */
function isolated(text) {
  const node = document.createElement("bdi");
  node.textContent = text;
  return node;
}

/** A text speaks for itself; a number or a yes needs its name. A year has no comma: digits are grouped from 10,000. */
function fact([name, value]) {
  if (typeof value === "boolean") return value ? spoken(name) : `not ${spoken(name)}`;
  if (typeof value !== "number") return value;
  return `${spoken(name)} ${value.toLocaleString(undefined, { useGrouping: "min2" })}`;
}

function priceOf(price, currency) {
  if (typeof price !== "number") return price === undefined ? "" : String(price);
  try {
    return new Intl.NumberFormat(undefined, { style: "currency", currency }).format(price);
  } catch { // no currency in the catalogue, or one that is no ISO code
    return [price.toFixed(2), currency].filter(Boolean).join(" ");
  }
}

const short = (time) => `${time.toFixed(time < 10 ? 1 : 0)}\u00a0ms`;
