// The page: every part is told what to do when a person does something.

import { onBox } from "./box.js";
import { element } from "./dom.js";
import { clearFilter, loadFacets, onFilter } from "./filters.js";
import { followAddress, more, refine, retry, searchExample, searchPhoto, tellGallery } from "./search.js";
import { followStatus } from "./status.js";
import { showExamples, takePhotos } from "./taking.js";

takePhotos(searchPhoto);
onBox((box) => refine({ box }));
onFilter((filter) => refine({ filter }));
element("more").addEventListener("click", more);
element("again").addEventListener("click", retry);
element("unfilter").addEventListener("click", clearFilter);
window.addEventListener("popstate", followAddress);
element("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the fragment is the search's
  ["answer-title", "problem", "main"].map(element).find((it) => it.checkVisibility()).focus();
});

// There is room for filters beside the photo, but on a phone they would push the results out of sight.
element("filters").open = matchMedia("(min-width: 700px)").matches;

// --- in the background: what fails there must not take the page from a person, and is tried again with the next news

let generation; // whose attributes the filters show
let hasExamples = false; // or they are on their way

async function loadExamples() {
  hasExamples = true;
  try {
    await showExamples(searchExample);
  } catch (error) {
    if (error.status === undefined) throw error;
    hasExamples = false;
  }
}

async function news({ gallery, limits }) {
  tellGallery(gallery.items, limits.max_body_bytes);
  if (!hasExamples) loadExamples();
  if (gallery.index.name !== generation && await loadFacets(gallery)) generation = gallery.index.name;
}

followAddress();
loadExamples();
followStatus(news);
