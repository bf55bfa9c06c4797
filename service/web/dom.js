// Small helpers that every part of the page uses.

export const element = (id) => document.getElementById(id);

export const copyOf = (template) => element(template).content.firstElementChild.cloneNode(true);

/** Tells it to those who do not see the page. */
export function announce(text) {
  element("announcement").textContent = text;
}

/** Tells it in one quiet line beside the photo, until the next search; an empty text takes the line away. */
export function tell(text) {
  element("told").textContent = text;
  element("told").hidden = text === "";
  if (text) announce(text);
}

export const counted = (number, word) => `${number.toLocaleString()} ${word}${number === 1 ? "" : "s"}`;

/** The name of an attribute as people write it. */
export const spoken = (name) => name.replaceAll("_", " ");

export const percent = (share) => `${(share * 100).toFixed(1)} %`;
