// Photos to search with: from a file, the camera, drag and drop, the clipboard or the examples.

import { fetchJson } from "./api.js";
import { cloneTemplate, element, showNotice } from "./dom.js";

const MAX_EXAMPLES = 24;

/** Calls `callback` with each photo that the user provides, and `onMore` with those to add to the search. */
export function onPhoto(callback, onMore) {
  for (const input of [element("upload"), element("camera")]) {
    input.addEventListener("change", () => {
      if (input.files.length) callback(input.files[0]);
      input.value = ""; // so that choosing the same file again fires the event
    });
  }
  const more = element("upload-more");
  more.addEventListener("change", () => {
    if (more.files.length) onMore([...more.files]);
    more.value = "";
  });
  document.addEventListener("paste", (event) => {
    const [photo] = event.clipboardData.files;
    if (photo) callback(photo);
  });
  document.addEventListener("dragover", (event) => {
    event.preventDefault(); // the browser would navigate to a dropped link
    // Links and selected text are dragged too: only a file shows the overlay.
    document.body.toggleAttribute("data-dragging", event.dataTransfer.types.includes("Files"));
  });
  document.addEventListener("dragleave", (event) => {
    if (event.relatedTarget === null) delete document.body.dataset.dragging;
  });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    delete document.body.dataset.dragging;
    const [photo] = event.dataTransfer.files;
    if (photo) callback(photo);
    else showNotice("That is not a file. Save the image first, then drop it here.");
  });
}

/** Shows the example photos of the service; calls `callback` with the name of the one that was clicked. */
export async function showExamples(callback) {
  const { examples } = await fetchJson("v1/examples", { background: true });
  element("examples").replaceChildren(...examples.slice(0, MAX_EXAMPLES).map(({ name, url }, position) => {
    const node = cloneTemplate("example");
    const button = node.querySelector("button");
    node.querySelector("img").src = url;
    button.setAttribute("aria-label", `Search with example photo ${position + 1}, ${name}`);
    button.addEventListener("click", () => callback(name));
    return node;
  }));
  element("examples-section").hidden = examples.length === 0;
}
