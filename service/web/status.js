// The status panel: what is searched, how well, and what is being re-indexed; kept current while it is looked at.
//
// It asks again from time to time rather than listening to the events of a job: those need a header with the key, which
// a browser's EventSource cannot send, and hold one of the few connections that a page may have.

import { askJson } from "./api.js";
import { copyOf, counted, element, percent } from "./dom.js";
import { forgetKey, heldKey, NEW_KEY } from "./key.js";

const BUSY_MS = 1500;
const CALM_MS = 15000;
const SHOWN_JOBS = 3;

let mayAskJobs = true; // until the service says that there are none to see for this key

/** Follows the service for as long as the page is open; `told` gets each status. */
export async function followStatus(told) {
  for (let background = false; ; background = true) {
    const busy = await look(background, told);
    const pause = new Promise((resolve) => setTimeout(resolve, busy ? BUSY_MS : CALM_MS));
    await Promise.race([pause, next(NEW_KEY)]);
    if (document.hidden) await next("visibilitychange");
  }
}

const next = (event) => new Promise((resolve) => document.addEventListener(event, resolve, { once: true }));

document.addEventListener(NEW_KEY, () => { mayAskJobs = true; });

async function look(background, told) {
  try {
    const status = await askJson("v1/status", { background });
    show(status);
    told(status);
    const jobs = await readJobs();
    showJobs(jobs);
    return jobs.some(({ state }) => state === "running");
  } catch (error) {
    if (error.status === undefined) throw error;
    return false; // a search will tell what is wrong; here the last news stay
  }
}

async function readJobs() {
  if (!mayAskJobs) return [];
  try {
    return (await askJson("v1/jobs", { background: true })).jobs;
  } catch (error) {
    mayAskJobs = ![401, 403, 404].includes(error.status);
    if (mayAskJobs) throw error;
    return [];
  }
}

// --- showing --------------------------------------------------------------------------------------------

function show({ gallery, bundle, provider }) {
  element("panel").hidden = false;
  const images = document.createElement("span"); // a phone has no room for them
  images.textContent = ` · ${counted(gallery.images, "image")}`;
  element("counts").replaceChildren(counted(gallery.items, "item"), images);
  element("empty").hidden = gallery.items > 0;
  list("gallery-facts", [
    ["Items", gallery.items.toLocaleString()],
    ["Images", gallery.images.toLocaleString()],
    ["Pending changes", gallery.index.pending.toLocaleString()],
    ["Index", gallery.index.kind ?? "none yet"],
    ["Recall@10 of the index", gallery.index.recall === null ? "not measured" : percent(gallery.index.recall)],
    ["Generation", gallery.index.name ?? "none yet"],
  ]);
  list("model-facts", bundle ? modelFacts(bundle, provider) : [["Model", "none yet"]]);
  element("forget").hidden = heldKey() === null;
}

function modelFacts(bundle, provider) {
  const [before, after] = [bundle.untrained_metrics["recall@1"], bundle.metrics["recall@1"]];
  const recall = [before, after].filter((share) => share !== undefined).map(percent).join(" → ");
  return [
    ...(recall ? [["Recall@1", recall]] : []),
    ["Backbone", bundle.backbone],
    ["Loss", bundle.loss],
    ["Dimensions", bundle.dimension.toLocaleString()],
    ["Runs on", (provider ?? "").replace("ExecutionProvider", "")],
    ["Bundle", bundle.id],
  ];
}

function list(id, facts) {
  element(id).replaceChildren(...facts.map(([name, value]) => {
    const row = document.createElement("div");
    const [term, told] = [document.createElement("dt"), document.createElement("dd")];
    [term.textContent, told.textContent] = [name, value];
    row.append(term, told);
    return row;
  }));
}

function showJobs(jobs) {
  const running = jobs.find(({ state }) => state === "running");
  element("busy").hidden = !running;
  if (running) setProgress(element("busy"), running);
  element("jobs-part").hidden = jobs.length === 0;
  element("jobs").replaceChildren(...jobs.slice(0, SHOWN_JOBS).map(jobLine));
}

function jobLine(job) {
  const node = copyOf("job");
  const find = (selector) => node.querySelector(selector);
  const runs = job.state === "running";
  find(".source").textContent = job.source.split("/").pop() || job.source;
  find(".source").title = job.source;
  find(".state").textContent = runs ? job.stage : job.state;
  find(".state").dataset.state = job.state;
  find("progress").hidden = !runs;
  find("progress").setAttribute("aria-label", `Progress of ${job.source}`);
  setProgress(find("progress"), job);
  find(".detail").textContent = [
    job.total ? `${job.done.toLocaleString()} of ${counted(job.total, "image")}` : "",
    job.rejected ? `${job.rejected.toLocaleString()} rejected` : "",
    runs && job.rate ? `${Number(job.rate.toFixed(job.rate < 10 ? 1 : 0)).toLocaleString()} a second` : "",
    runs && job.seconds_left != null ? `${remaining(job.seconds_left)} left` : "",
    runs ? "" : new Date(job.updated * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }),
    job.message,
  ].filter(Boolean).join(" · ");
  return node;
}

/** The share done; before the source was counted it is unknown, and the bar says so. */
function setProgress(bar, { done, total }) {
  if (total) Object.assign(bar, { max: total, value: done });
  else bar.removeAttribute("value");
}

const remaining = (seconds) => seconds < 90 ? `${Math.ceil(seconds)} s` : `${Math.round(seconds / 60)} min`;

// --- opening and closing --------------------------------------------------------------------------------

const panel = element("panel");
document.addEventListener("click", (event) => {
  if (!panel.contains(event.target)) panel.open = false;
});
panel.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !panel.open) return;
  panel.open = false;
  panel.querySelector("summary").focus();
});
element("forget").addEventListener("click", () => {
  forgetKey();
  location.reload();
});
