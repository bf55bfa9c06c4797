// The entry point: connects the modules of the page.

import { onBoxChange } from "./box.js";
import { element } from "./dom.js";
import { clearFilter, loadFacets, onFilterChange } from "./filters.js";
import { onOptionsChange } from "./options.js";
import { showRankings } from "./rankings.js";
import {
  addPhotos, loadMore, refine, restoreFromUrl, retry, searchExample, searchPhoto, setGallery,
} from "./search.js";
import { pollStatus } from "./status.js";
import { onPhoto, showExamples } from "./upload.js";

onPhoto(searchPhoto, addPhotos);
onBoxChange((box) => refine({ box }));
onFilterChange((filter) => refine({ filter }));
onOptionsChange(refine);
element("show-more").addEventListener("click", loadMore);
element("retry").addEventListener("click", retry);
element("no-results-clear").addEventListener("click", clearFilter);
window.addEventListener("popstate", restoreFromUrl);
element("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the fragment holds the search
  ["results-title", "problem", "main"].map(element).find((target) => target.checkVisibility()).focus();
});

// Filters are open where there is room; on a phone they would push the results off the screen.
element("filters").open = matchMedia("(min-width: 700px)").matches;

// --- background updates: a failure does not disturb the page and is retried with the next status

let generation; // of the attributes that the filters show
let hasExamples = false; // loaded or loading

async function loadExamples() {
  hasExamples = true;
  try {
    await showExamples(searchExample);
  } catch (error) {
    if (error.status === undefined) throw error;
    hasExamples = false;
  }
}

async function updateGallery({ gallery, limits, keys, scope }) {
  setGallery(gallery.items, limits);
  showRankings(!keys || scope !== "search");
  if (!hasExamples) loadExamples();
  if (gallery.index.name !== generation && await loadFacets(gallery)) generation = gallery.index.name;
}

restoreFromUrl();
loadExamples();
pollStatus(updateGallery);
