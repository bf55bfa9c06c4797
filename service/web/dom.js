// Helpers that every module uses.

export const element = (id) => document.getElementById(id);

export const cloneTemplate = (template) => element(template).content.firstElementChild.cloneNode(true);

/** Announces a text to screen readers. */
export function announce(text) {
  element("announcement").textContent = text;
}

/** Shows a one-line notice next to the photo until the next search; an empty text hides it. */
export function showNotice(text) {
  element("notice").textContent = text;
  element("notice").hidden = text === "";
  if (text) announce(text);
}

export const pluralize = (number, word) => `${number.toLocaleString()} ${word}${number === 1 ? "" : "s"}`;

/** Formats the name of an attribute for display. */
export const displayName = (name) => name.replaceAll("_", " ");

/** Formats the name of an attribute as a heading. */
export const heading = (name) => name.charAt(0).toUpperCase() + displayName(name.slice(1));

export const percent = (share) => `${(share * 100).toFixed(1)} %`;
