// Processes that the server started, with the end of their logs.

import { get } from "./api.js";
import { fill, h } from "./dom.js";
import { age } from "./format.js";
import { progressBar, stateMark, timeLeft } from "./parts.js";

const EVERY = 2000; // ms

/** A panel of jobs that refreshes itself while the page is open. `changed` is called when one ends. */
export function jobsPanel(view, { kinds = null, changed = () => {} } = {}) {
  const list = h("ol", { class: "jobs" });
  const panel = h("section", { class: "question", hidden: true }, h("h2", {}, "Started from this page"), list);
  let before = "";
  const look = async () => {
    const found = await get("jobs").catch(() => null);
    if (!found || !view.isOpen()) return;
    const jobs = found.jobs.filter((job) => !kinds || kinds.includes(job.kind));
    panel.hidden = jobs.length === 0;
    const opened = new Set([...list.querySelectorAll("details[open]")].map((each) => each.dataset.job));
    fill(
      list,
      jobs.map((job) =>
        h(
          "li",
          {},
          stateMark(job.state),
          h("b", {}, job.name),
          h("small", {}, `${job.kind}, started ${age(job.started)} ago`),
          stageOf(job),
          h(
            "details",
            { "data-job": job.id, open: opened.has(job.id) || job.state === "failed" },
            h("summary", {}, "Log"),
            h("pre", { class: "settings" }, job.log),
          ),
        ),
      ),
    );
    const now = jobs.map((job) => `${job.id}${job.state}`).join();
    if (before && before !== now) changed();
    before = now;
  };
  look();
  const timer = setInterval(look, EVERY);
  view.onClose(() => clearInterval(timer));
  return panel;
}

/** The current run of a job: its stage, its progress, the time left, and a link to it. */
function stageOf(job) {
  const under = job.stages.findLast((stage) => stage.run);
  if (!under) return job.state === "running" && h("small", {}, "starting");
  const { run } = under;
  const place = job.stages.length > 1 ? `Stage ${job.stages.indexOf(under) + 1} of ${job.stages.length}: ` : "";
  return h(
    "span",
    { class: "row stage" },
    `${place}${under.title}`,
    progressBar(run.step, run.steps),
    job.state === "running" && h("small", {}, run.state === "running" ? timeLeft(run.seconds_left) || "first step" : ""),
    h("a", { href: `#/run/${run.id}` }, `Open ${run.name}`),
  );
}
