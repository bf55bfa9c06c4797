// The API key of this tab: kept in its session, asked for when the service refuses a request without it.

import { element } from "./dom.js";

export const NEW_KEY = "newkey"; // the event that tells of one
const PLACE = "lookalike-key";
let asking = null; // several requests may be refused at once: they wait for one answer

export const heldKey = () => sessionStorage.getItem(PLACE);

export const forgetKey = () => sessionStorage.removeItem(PLACE);

/** Answers whether there is a key now that differs from the one that was refused. */
export function askForKey(refused, problem) {
  if (heldKey() !== refused) return Promise.resolve(heldKey() !== null);
  asking ??= prompt(refused, problem).finally(() => { asking = null; });
  return asking;
}

function prompt(refused, problem) {
  const [dialog, field] = [element("key-dialog"), element("key")];
  element("key-why").textContent = refused === null
    ? "This service answers only to those who have one."
    : `${problem.detail} ${problem.remedy}`;
  field.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const key = field.value.trim();
      const given = dialog.returnValue === "given" && key !== "";
      if (given) {
        sessionStorage.setItem(PLACE, key);
        document.dispatchEvent(new Event(NEW_KEY));
      }
      resolve(given);
    }, { once: true });
  });
}

element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  element("key-dialog").close("given");
});
element("key-cancel").addEventListener("click", () => element("key-dialog").close());
