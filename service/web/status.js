// The status panel: gallery, model and jobs, updated while the page is visible.
//
// It polls instead of listening to the events of a job: those need a header with the key, which a browser's EventSource
// cannot send, and hold one of the few connections that a page may have.

import { fetchJson } from "./api.js";
import { cloneTemplate, element, percent, pluralize } from "./dom.js";
import { forgetKey, NEW_KEY, storedKey } from "./key.js";

const BUSY_INTERVAL_MS = 1500; // while a job runs
const IDLE_INTERVAL_MS = 15000;
const MAX_JOBS = 3;

let canReadJobs = true; // until the service refuses it for this key

/** Polls the status while the page is open; calls `callback` with each one. */
export async function pollStatus(callback) {
  for (let background = false; ; background = true) {
    const busy = await poll(background, callback);
    const pause = new Promise((resolve) => setTimeout(resolve, busy ? BUSY_INTERVAL_MS : IDLE_INTERVAL_MS));
    await Promise.race([pause, next(NEW_KEY)]);
    if (document.hidden) await next("visibilitychange");
  }
}

const next = (event) => new Promise((resolve) => document.addEventListener(event, resolve, { once: true }));

document.addEventListener(NEW_KEY, () => { canReadJobs = true; });

async function poll(background, callback) {
  try {
    const status = await fetchJson("v1/status", { background });
    showStatus(status);
    callback(status);
    const jobs = await readJobs();
    showJobs(jobs);
    return jobs.some(({ state }) => state === "running");
  } catch (error) {
    if (error.status === undefined) throw error;
    return false; // a search reports the error; the panel keeps the last status
  }
}

async function readJobs() {
  if (!canReadJobs) return [];
  try {
    return (await fetchJson("v1/jobs", { background: true })).jobs;
  } catch (error) {
    canReadJobs = ![401, 403, 404].includes(error.status);
    if (canReadJobs) throw error;
    return [];
  }
}

// --- display --------------------------------------------------------------------------------------------

function showStatus({ gallery, bundle, provider }) {
  element("panel").hidden = false;
  const images = document.createElement("span"); // hidden on phones
  images.textContent = ` · ${pluralize(gallery.images, "image")}`;
  element("counts").replaceChildren(pluralize(gallery.items, "item"), images);
  element("empty").hidden = gallery.items > 0;
  showFacts("gallery-facts", [
    ["Items", gallery.items.toLocaleString()],
    ["Images", gallery.images.toLocaleString()],
  ]);
  showFacts("index-facts", [
    ["Pending changes", gallery.index.pending.toLocaleString()],
    ["Kind", gallery.index.kind ?? "none yet"],
    ["Recall@10 of the index", gallery.index.recall === null ? "not measured" : percent(gallery.index.recall)],
    ["Generation", gallery.index.name ?? "none yet"],
  ]);
  showFacts("model-facts", bundle ? modelFacts(bundle, provider) : [["Model", "none yet"]]);
  element("forget-key").hidden = storedKey() === null;
}

function modelFacts(bundle, provider) {
  const [before, after] = [bundle.untrained_metrics["recall@1"], bundle.metrics["recall@1"]];
  const recall = [before, after].filter((share) => share !== undefined).map(percent).join(" → ");
  return [
    ...(recall ? [["Recall@1", recall]] : []),
    ["Backbone", bundle.backbone],
    ["Loss", bundle.loss ?? "none, as pretrained"],
    ["Dimensions", bundle.dimension.toLocaleString()],
    ["Runs on", (provider ?? "").replace("ExecutionProvider", "")],
    ["Bundle", bundle.id],
  ];
}

function showFacts(id, facts) {
  element(id).replaceChildren(...facts.map(([name, value]) => {
    const row = document.createElement("div");
    const [term, description] = [document.createElement("dt"), document.createElement("dd")];
    [term.textContent, description.textContent] = [name, value];
    row.append(term, description);
    return row;
  }));
}

function showJobs(jobs) {
  const running = jobs.find(({ state }) => state === "running");
  element("job-progress").hidden = !running;
  if (running) setProgress(element("job-progress"), running);
  element("jobs-section").hidden = jobs.length === 0;
  element("jobs").replaceChildren(...jobs.slice(0, MAX_JOBS).map(createJob));
}

function createJob(job) {
  const node = cloneTemplate("job");
  const find = (selector) => node.querySelector(selector);
  const isRunning = job.state === "running";
  find(".source").textContent = job.source.split("/").pop() || job.source;
  find(".source").title = job.source;
  find(".state").textContent = isRunning ? job.stage : job.state;
  find(".state").dataset.state = job.state;
  find("progress").hidden = !isRunning;
  find("progress").setAttribute("aria-label", `Progress of ${job.source}`);
  setProgress(find("progress"), job);
  find(".detail").textContent = [
    job.total ? `${job.done.toLocaleString()} of ${pluralize(job.total, "image")}` : "",
    job.rejected ? `${job.rejected.toLocaleString()} rejected` : "",
    isRunning && job.rate ? `${Number(job.rate.toFixed(job.rate < 10 ? 1 : 0)).toLocaleString()} images/s` : "",
    isRunning && job.seconds_left != null ? `${formatDuration(job.seconds_left)} left` : "",
    isRunning ? "" : new Date(job.updated).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }),
    job.message,
  ].filter(Boolean).join(" · ");
  return node;
}

/** Shows the progress; the bar is indeterminate until the source has been counted. */
function setProgress(bar, { done, total }) {
  if (total) Object.assign(bar, { max: total, value: done });
  else bar.removeAttribute("value");
}

const formatDuration = (seconds) => seconds < 90 ? `${Math.ceil(seconds)} s` : `${Math.round(seconds / 60)} min`;

// --- details for developers, of the index, the model and the time that a search took -----------------------

const SWITCH_KEY = "lookalike-developer";

function showDeveloperDetails(isShown) {
  element("developer").checked = isShown;
  document.documentElement.toggleAttribute("data-developer", isShown);
}

element("developer").addEventListener("change", ({ target }) => {
  localStorage.setItem(SWITCH_KEY, String(target.checked));
  showDeveloperDetails(target.checked);
});
showDeveloperDetails(localStorage.getItem(SWITCH_KEY) === "true");

// --- open and close -------------------------------------------------------------------------------------

const panel = element("panel");
document.addEventListener("click", (event) => {
  if (!panel.contains(event.target)) panel.open = false;
});
panel.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !panel.open) return;
  panel.open = false;
  panel.querySelector("summary").focus();
});
element("forget-key").addEventListener("click", () => {
  forgetKey();
  location.reload();
});
