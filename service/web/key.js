// The API key of this tab: stored in its session, requested when the service refuses a request without it.

import { element } from "./dom.js";

export const NEW_KEY = "newkey"; // fired when the user has entered a key
const STORAGE_KEY = "lookalike-key";
let pending = null; // several requests may be refused at once: they share one dialog

export const storedKey = () => sessionStorage.getItem(STORAGE_KEY);

export const forgetKey = () => sessionStorage.removeItem(STORAGE_KEY);

/** Asks the user for a key; resolves to whether there is one now that differs from the refused one. */
export function requestKey(refused, problem) {
  if (storedKey() !== refused) return Promise.resolve(storedKey() !== null);
  pending ??= showDialog(refused, problem).finally(() => { pending = null; });
  return pending;
}

function showDialog(refused, problem) {
  const [dialog, field] = [element("key-dialog"), element("key")];
  element("key-reason").textContent = refused === null
    ? "This service requires an API key."
    : `${problem.detail} ${problem.remedy}`;
  field.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const key = field.value.trim();
      const entered = dialog.returnValue === "entered" && key !== "";
      if (entered) {
        sessionStorage.setItem(STORAGE_KEY, key);
        document.dispatchEvent(new Event(NEW_KEY));
      }
      resolve(entered);
    }, { once: true });
  });
}

element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  element("key-dialog").close("entered");
});
element("key-cancel").addEventListener("click", () => element("key-dialog").close());
