// The ways a photo comes in: chosen, taken with the camera, dropped, pasted, or one of the examples.

import { askJson } from "./api.js";
import { copyOf, element, tell } from "./dom.js";

const MOST_EXAMPLES = 24;

/** Calls `take` with each photo that somebody gives. */
export function takePhotos(take) {
  for (const input of [element("choose"), element("take")]) {
    input.addEventListener("change", () => {
      if (input.files.length) take(input.files[0]);
      input.value = ""; // so that choosing the same file again is a change
    });
  }
  document.addEventListener("paste", (event) => {
    const [photo] = event.clipboardData.files;
    if (photo) take(photo);
  });
  document.addEventListener("dragover", (event) => {
    event.preventDefault(); // the browser would leave the page for a dropped link
    // A link or a selected text may be on its way to elsewhere: only a file is worth the veil.
    document.body.toggleAttribute("data-dragging", event.dataTransfer.types.includes("Files"));
  });
  document.addEventListener("dragleave", (event) => {
    if (event.relatedTarget === null) delete document.body.dataset.dragging;
  });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    delete document.body.dataset.dragging;
    const [photo] = event.dataTransfer.files;
    if (photo) take(photo);
    else tell("That was not a file. Save the picture, then drop it here.");
  });
}

/** Shows the photos that the operator offers, if they can be had; `take` gets the name of the one that was clicked. */
export async function showExamples(take) {
  const { examples } = await askJson("v1/examples", { background: true });
  element("examples").replaceChildren(...examples.slice(0, MOST_EXAMPLES).map(({ name, url }, position) => {
    const node = copyOf("example");
    const button = node.querySelector("button");
    node.querySelector("img").src = url;
    button.setAttribute("aria-label", `Search with example photo ${position + 1}, ${name}`);
    button.addEventListener("click", () => take(name));
    return node;
  }));
  element("try").hidden = examples.length === 0;
}
