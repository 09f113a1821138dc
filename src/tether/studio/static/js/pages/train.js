// Train from votes: how many there are, what they have taught so far, and one button that teaches more.

import { get, post } from "../api.js";
import { button, field, fill, h } from "../dom.js";
import { makeChart } from "../chart.js";
import { age, count } from "../format.js";
import { bindPage } from "../keys.js";
import { jobsPanel } from "../jobs.js";
import { notice, tried } from "../notices.js";

export async function open(view) {
  const { queues } = await get("train");
  const page = { view, queues, at: 0, charts: [] };
  page.list = h("div", { class: "queues" });
  fill(view.root, h("div", { class: "head" }, h("h1", { class: "grow" }, "Train from votes")), page.list,
    jobsPanel(view, { kinds: ["train"], changed: () => tried(() => refresh(page)) }));
  view.onClose(() => page.charts.forEach((chart) => chart.close()));
  draw(page);
  bindPage([
    { key: ["j", "ArrowDown"], does: "Next queue", run: () => move(page, 1) },
    { key: ["k", "ArrowUp"], does: "Queue before", run: () => move(page, -1) },
    { key: "t", does: "Train a reward model, then a policy", run: () => page.queues[page.at] && askTrain(page, page.queues[page.at]) },
  ]);
}

async function refresh(page) {
  page.queues = (await get("train")).queues;
  if (page.view.isOpen()) draw(page);
}

function move(page, by) {
  page.at = Math.max(0, Math.min(page.queues.length - 1, page.at + by));
  [...page.list.children].forEach((card, place) => card.classList.toggle("at", place === page.at));
  page.list.children[page.at]?.scrollIntoView({ block: "nearest" });
}

function draw(page) {
  page.charts.splice(0).forEach((chart) => chart.close());
  fill(page.list, page.queues.length
    ? page.queues.map((queue) => card(page, queue))
    : h("div", { class: "empty" }, "No votes yet. ", h("a", { href: "#/label" }, "Label some pairs"), " first."));
  move(page, 0);
}

function card(page, queue) {
  const place = h("div", {});
  drawCurve(page, queue, place);
  return h("section", { class: "panel queue" },
    h("div", { class: "row" }, h("h2", { class: "grow" }, queue.name), h("a", { href: `#/label/${queue.id}` }, "Judge more")),
    h("dl", { class: "latest" },
      h("div", {}, h("dt", {}, "Votes since the last reward model"), h("dd", {}, queue.since_last)),
      h("div", {}, h("dt", {}, "Votes"), h("dd", {}, queue.votes)),
      queue.pairs !== undefined && h("div", {}, h("dt", {}, "Preferences in them"), h("dd", {}, queue.pairs))),
    place,
    (queue.models ?? []).length > 0 && h("ol", { class: "jobs" }, queue.models.map((model) => h("li", {},
      model.run ? h("a", { href: `#/run/${model.run}` }, model.name) : h("b", {}, model.name), h("small", {}, `from ${count(model.votes, "vote")}, ${age(model.created)} ago`)))),
    h("div", { class: "row" }, button("Train a reward model, then PPO", () => askTrain(page, queue), { kind: "main", key: "t" })));
}

async function drawCurve(page, queue, place) {
  const found = await get("train/curve", { queue: queue.id }).catch(() => null);
  if (!found?.points?.length || !page.view.isOpen()) return;
  const { points } = found;
  const chart = makeChart({ name: `accuracy-by-votes-${queue.id}`, title: "Held-out accuracy as votes grow", note: "share of pairs that were kept aside and ranked as people did; across: votes", group: `curve-${queue.id}`, zoomed: () => {}, unit: "votes" });
  page.charts.push(chart);
  fill(place, chart.frame);
  const bounds = points.every((each) => Number.isFinite(each.low) && Number.isFinite(each.high));
  const line = { label: queue.name, steps: points.map((each) => each.votes), values: points.map((each) => each.accuracy) };
  chart.show([bounds ? { ...line, low: points.map((each) => each.low), high: points.map((each) => each.high) } : line], {});
}

function askTrain(page, queue) {
  const model = h("input", { value: queue.model ?? "", placeholder: "the model that gave the answers" });
  const reward = h("input", { type: "number", min: 1, placeholder: "by the number of votes" });
  const policy = h("input", { type: "number", min: 0, placeholder: "default" });
  const dialog = h("dialog", { "aria-label": "Train from votes" }, h("h2", {}, `Train from the votes of ${queue.name}`),
    h("p", {}, "First a reward model learns what was preferred. Then PPO trains a policy on it. Which votes were used is written beside the run."),
    h("form", { class: "stack", onsubmit: async (event) => {
      event.preventDefault();
      const body = { queue_id: queue.id };
      if (model.value.trim()) body.model = model.value.trim();
      if (reward.value) body.reward_steps = Number(reward.value);
      if (policy.value) body.ppo_steps = Number(policy.value);
      const made = await tried(() => post("train", body));
      if (!made) return;
      dialog.close();
      notice(`${made.name} has started`);
    } }, field("Model", model), field("Steps of the reward model", reward), field("Steps of PPO", policy),
    h("div", { class: "row" }, h("button", { class: "main" }, "Train"), button("Cancel", () => dialog.close()))));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  dialog.querySelector("button.main").focus();
}
