// The page: every part is told what to do when a person does something.

import { onBox } from "./box.js";
import { element } from "./dom.js";
import { clearFilter, loadFacets, onFilter } from "./filters.js";
import { showProblem } from "./results.js";
import { followAddress, more, refine, retry, searchExample, searchPhoto, tellGallery } from "./search.js";
import { followStatus } from "./status.js";
import { showExamples, takePhotos } from "./taking.js";

takePhotos(searchPhoto, showProblem);
onBox((box) => refine({ box }));
onFilter((filter) => refine({ filter }));
element("more").addEventListener("click", more);
element("again").addEventListener("click", retry);
element("unfilter").addEventListener("click", clearFilter);
window.addEventListener("popstate", followAddress);
element("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the fragment is the search's
  element("main").focus();
});

// There is room for filters beside the photo, but on a phone they would push the results out of sight.
element("filters").open = matchMedia("(min-width: 800px)").matches;

let generation; // whose attributes the filters show

function news(status) {
  tellGallery(status);
  if (status.gallery.generation === generation) return;
  generation = status.gallery.generation;
  loadFacets().catch(showProblem);
}

followAddress();
showExamples(searchExample).catch(showProblem);
followStatus(news).catch(showProblem);
