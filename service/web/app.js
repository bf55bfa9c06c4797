// The page: takes a photo by file, camera, drop or paste, asks the service, and shows what it answers.

const TOP = 12;
const element = (id) => document.getElementById(id);
const page = {
  answer: element("answer"), announcement: element("announcement"), counts: element("counts"),
  examples: element("examples"), photo: element("photo"), problem: element("problem"), query: element("query"),
  results: element("results"), status: element("status"), times: element("times"), try: element("try"),
};

let limits = null; // known once the status has arrived; until then the service alone refuses
let running = null; // the AbortController of the search under way: a new photo replaces it

// --- asking ---------------------------------------------------------------------------------------------

class Problem extends Error {
  constructor({ title, detail, remedy, request_id: id }) {
    super(detail);
    Object.assign(this, { title, detail, remedy, id });
  }
}

async function ask(address, options) {
  let response;
  try {
    response = await fetch(address, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({
      title: "The service cannot be reached", detail: "No answer came back.",
      remedy: "Check your connection, then try again.",
    });
  }
  if (response.ok) return response;
  const known = (response.headers.get("Content-Type") ?? "").startsWith("application/problem+json");
  throw new Problem(known ? await response.json() : {
    title: "Something on the way failed", detail: `The answer was ${response.status} ${response.statusText}.`,
    remedy: "Try again in a moment.",
  });
}

/** Searches with a file, or with a picture at an address: an example, or an image of the gallery. */
async function search(source) {
  running?.abort();
  const { signal } = running = new AbortController();
  showWaiting();
  try {
    const photo = source instanceof Blob ? source : await (await ask(source, { signal })).blob();
    showQuery(photo);
    if (limits && photo.size > limits.max_body_bytes) {
      throw new Problem({
        title: "The photo is too large",
        detail: `It has ${megabytes(photo.size)}; the limit is ${megabytes(limits.max_body_bytes)}.`,
        remedy: "Choose a smaller one.",
      });
    }
    const form = new FormData();
    form.append("image", photo);
    showAnswer(await (await ask(`v1/search?top=${TOP}`, { method: "POST", body: form, signal })).json());
  } catch (error) {
    if (!signal.aborted) showProblem(error);
  }
}

// --- showing --------------------------------------------------------------------------------------------

function setState(state) {
  document.body.className = `asked ${state}`;
  page.answer.hidden = false;
  page.answer.setAttribute("aria-busy", String(state === "searching"));
  page.problem.hidden = state !== "failed";
}

function showQuery(photo) {
  URL.revokeObjectURL(page.photo.src);
  page.photo.src = URL.createObjectURL(photo);
  page.query.hidden = false;
}

function showWaiting() {
  // The button that asked may be about to go: the keyboard continues from the heading, not from the top.
  if (page.results.contains(document.activeElement)) element("answer-title").focus();
  page.times.textContent = "";
  page.announcement.textContent = "Searching";
  page.results.replaceChildren(...Array.from({ length: TOP }, () => copyOf("skeleton")));
  setState("searching");
  window.scrollTo({ top: 0 });
}

function showAnswer({ items, milliseconds: { decode, embed, search: find } }) {
  page.results.replaceChildren(...items.map(card));
  page.times.textContent = `decode ${short(decode)} · embed ${short(embed)} · search ${short(find)}`;
  page.announcement.textContent = items.length
    ? `${items.length} items found. The closest is ${items[0].title || items[0].id}.`
    : "The gallery is empty.";
  setState("found");
}

function showProblem(error) {
  const { title, detail, remedy, id } = error instanceof Problem ? error : {
    title: "The page failed", detail: String(error), remedy: "Load it again.",
  };
  page.results.replaceChildren();
  page.times.textContent = page.announcement.textContent = "";
  setState("failed");
  element("problem-title").textContent = title;
  element("problem-detail").textContent = detail;
  element("problem-remedy").textContent = remedy;
  element("problem-id").textContent = id ? `Request ${id}` : "";
}

function card(item) {
  const node = copyOf("result");
  const find = (selector) => node.querySelector(selector);
  const name = item.title || item.id;
  const { brand, price, currency } = item.attributes;
  const colour = item.attributes.colour ?? item.attributes.color;

  find("img").src = item.image.url;
  find(".again").setAttribute("aria-label", `Find what looks like ${name}`);
  find(".again").title = "More like this";
  find(".again").addEventListener("click", () => search(item.image.url));
  find(".bar-fill").style.setProperty("--share", Math.min(Math.max(item.score, 0), 1));
  find(".number").textContent = item.score.toFixed(2);
  find(".score").title = "Likeness: the cosine of the two pictures' vectors";
  find(".title").append(titleOf(item, name));
  find(".facts").textContent = [brand, colour].filter(Boolean).join(" · ");
  find(".price").textContent = priceOf(price, currency);
  find(".price").hidden = price === undefined;
  return node;
}

function titleOf(item, name) {
  // Only web addresses become links: a catalogue is data, and "javascript:" is an address too.
  if (!/^https?:\/\//i.test(item.url)) return document.createTextNode(name);
  const link = document.createElement("a");
  Object.assign(link, { href: item.url, textContent: name, target: "_blank", rel: "noopener noreferrer" });
  return link;
}

function fact(text) {
  const span = document.createElement("span");
  span.textContent = text;
  return span;
}

function priceOf(price, currency) {
  if (typeof price !== "number") return price === undefined ? "" : String(price);
  try {
    return new Intl.NumberFormat(undefined, { style: "currency", currency }).format(price);
  } catch { // no currency in the catalogue, or one that is no ISO code
    return [price.toFixed(2), currency].filter(Boolean).join(" ");
  }
}

const copyOf = (id) => element(id).content.firstElementChild.cloneNode(true);
const short = (time) => `${time.toFixed(time < 10 ? 1 : 0)}\u00a0ms`;
const count = (number, word) => `${number.toLocaleString()} ${word}${number === 1 ? "" : "s"}`;
const megabytes = (bytes) => `${(bytes / 1024 ** 2).toFixed(1)} MB`;

// --- taking a photo -------------------------------------------------------------------------------------

for (const input of [element("choose"), element("take")]) {
  input.addEventListener("change", () => {
    if (input.files.length) search(input.files[0]);
    input.value = ""; // so that choosing the same file again is a change
  });
}

document.addEventListener("paste", (event) => {
  const [photo] = event.clipboardData.files;
  if (photo) search(photo);
});

document.addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.dataset.dragging = "";
});
document.addEventListener("dragleave", (event) => {
  if (event.relatedTarget === null) delete document.body.dataset.dragging;
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  delete document.body.dataset.dragging;
  const [photo] = event.dataTransfer.files;
  if (photo) search(photo);
  else showProblem(new Problem({
    title: "That was not a file", detail: "Only its address was dropped.",
    remedy: "Save the picture, then drop the file.",
  }));
});

page.photo.addEventListener("error", () => { page.query.hidden = true; });

// --- on arrival -----------------------------------------------------------------------------------------

async function showStatus() {
  const { gallery, bundle, limits: told } = await (await ask("v1/status")).json();
  limits = told;
  page.counts.textContent = `${count(gallery.items, "item")} · ${count(gallery.images, "image")}`;
  const before = bundle.untrained_metrics["recall@1"];
  const after = bundle.metrics["recall@1"];
  const percent = (share) => `${(share * 100).toFixed(1)} %`;
  const facts = [`${bundle.backbone}, ${bundle.loss}`, `${bundle.dimension} dimensions`, `bundle ${bundle.id}`];
  if (after !== undefined) {
    facts.unshift(`Recall@1 ${before === undefined ? "" : `${percent(before)} → `}${percent(after)}`);
  }
  page.status.replaceChildren(...facts.map(fact));
}

async function showExamples() {
  const { examples } = await (await ask("v1/examples")).json();
  page.examples.replaceChildren(...examples.map(({ name, url }, position) => {
    const node = copyOf("example");
    node.querySelector("img").src = url;
    const button = node.querySelector("button");
    button.setAttribute("aria-label", `Search with example photo ${position + 1}, ${name}`);
    button.addEventListener("click", () => search(url));
    return node;
  }));
  page.try.hidden = examples.length === 0;
}

for (const show of [showStatus, showExamples]) {
  show().catch((error) => { page.status.replaceChildren(fact(error.detail ?? error)); });
}
