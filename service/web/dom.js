// Small helpers that every part of the page uses.

export const element = (id) => document.getElementById(id);

export const copyOf = (template) => element(template).content.firstElementChild.cloneNode(true);

/** Tells it to those who do not see the page. */
export function announce(text) {
  element("announcement").textContent = text;
}

export const counted = (number, word) => `${number.toLocaleString()} ${word}${number === 1 ? "" : "s"}`;

export const percent = (share) => `${(share * 100).toFixed(1)} %`;
