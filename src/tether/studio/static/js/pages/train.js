// Train from votes: the number of votes, the results so far, and a button to train again.

import { get, post } from "../api.js";
import { ask } from "../dialogs.js";
import { button, choose, field, fill, h } from "../dom.js";
import { makeChart } from "../chart.js";
import { age, count, percent } from "../format.js";
import { bindPage } from "../keys.js";
import { demonstrationSection } from "../demonstrations.js";
import { jobsPanel } from "../jobs.js";
import { notice, tried } from "../notices.js";
import { emptyState, howItWorks, stateMark } from "../parts.js";

export async function open(view) {
  const page = { view, queues: [], at: 0, charts: [] };
  page.list = h("div", { class: "queues" });
  fill(
    view.root,
    h("div", { class: "head" }, h("h1", { class: "grow" }, "Train from votes")),
    page.list,
    demonstrationSection(view),
    jobsPanel(view, { kinds: ["train"], changed: () => tried(() => refresh(page)) }),
    (page.how = h("div", {})),
  );
  view.onClose(() => page.charts.forEach((chart) => chart.close()));
  bindPage([
    { key: ["j", "ArrowDown"], does: "Next queue", run: () => move(page, 1) },
    { key: ["k", "ArrowUp"], does: "Previous queue", run: () => move(page, -1) },
    {
      key: "t",
      does: "Train a reward model, then a policy",
      run: () => page.queues[page.at] && askTrain(page, page.queues[page.at]),
    },
  ]);
  await refresh(page);
}

/** The queues with preferences, each with the models trained on it so far. */
async function refresh(page) {
  const [{ queues }, { runs }] = await Promise.all([get("label/queues"), get("runs")]);
  const preferences = queues.filter((queue) => queue.kind !== "demonstration" && queue.votes > 0);
  page.runs = runs;
  page.queues = await Promise.all(
    preferences.map(async (queue) => ({ ...queue, ...(await get("train/curve", { queue: queue.id })) })),
  );
  if (page.view.isOpen()) draw(page);
}

function move(page, by) {
  page.at = Math.max(0, Math.min(page.queues.length - 1, page.at + by));
  [...page.list.children].forEach((card, place) => card.classList.toggle("at", place === page.at));
  page.list.children[page.at]?.scrollIntoView({ block: "nearest" });
}

function draw(page) {
  page.charts.splice(0).forEach((chart) => chart.close());
  fill(page.how, page.queues.length > 0 && page.queues.length < 3 && how());
  fill(
    page.list,
    page.queues.length
      ? page.queues.map((queue) => card(page, queue))
      : emptyState(
          "A reward model learns from votes, and there are none yet.",
          h("a", { class: "button main", href: "#/label" }, "Judge some answers"),
        ),
  );
  move(page, 0);
}

function card(page, queue) {
  const place = h("div", {});
  const made = queue.points
    .toReversed()
    .map((model) =>
      h(
        "li",
        {},
        stateMark(model.state),
        h("a", { href: `#/run/${model.id}` }, model.run),
        h("small", {}, `${count(model.votes, "vote")}, accuracy ${percent(model.accuracy)}, ${age(model.created)} ago`),
        policyOf(page, model),
      ),
    );
  queueMicrotask(() => drawCurve(page, queue, place));
  return h(
    "section",
    { class: "panel queue" },
    h(
      "div",
      { class: "row" },
      h("h2", { class: "grow" }, queue.name),
      h("a", { href: `#/label/${queue.id}` }, "Judge more"),
    ),
    h(
      "dl",
      { class: "latest" },
      h("div", {}, h("dt", {}, "Votes since the last reward model"), h("dd", {}, queue.since_last)),
      h("div", {}, h("dt", {}, "Votes"), h("dd", {}, queue.votes)),
      h("div", {}, h("dt", {}, "Pairs decided"), h("dd", {}, queue.pairs)),
    ),
    place,
    made.length > 0 && h("ol", { class: "jobs" }, made),
    h(
      "div",
      { class: "row" },
      button("Train a reward model, then PPO", () => askTrain(page, queue), { kind: "main", key: "t" }),
    ),
  );
}

function how() {
  return howItWorks(
    "How votes train a model",
    ["Judge", "Each vote says which of two answers is better. Some items are held out, and stay held out as votes grow."],
    ["Reward model", "It learns to score the better answer higher. Its accuracy on the held-out pairs says how far to trust it."],
    ["Policy", "PPO trains the policy on the reward model's scores, and a KL penalty keeps it close to where it started."],
  );
}

/** The policy that was trained against a reward model is beside it in the workspace. */
function policyOf(page, model) {
  const policy = page.runs.find((run) => run.name === model.run.replace(/reward$/, "ppo"));
  return (
    policy &&
    h(
      "span",
      { class: "row" },
      "then",
      h("a", { href: `#/run/${policy.id}` }, policy.name),
      stateMark(policy.state),
      h("a", { href: `#/chat?run=${policy.id}` }, "Chat"),
    )
  );
}

function drawCurve(page, queue, place) {
  const points = queue.points.filter((each) => each.accuracy !== null).toSorted((a, b) => a.votes - b.votes);
  if (!points.length) return;
  const note = "share of held-out pairs that are ranked as people ranked them, by number of votes";
  const chart = makeChart({
    name: `accuracy-by-votes-${queue.id}`,
    title: "Held-out accuracy",
    note,
    group: `curve-${queue.id}`,
    zoomed: () => {},
    across: "votes",
  });
  page.charts.push(chart);
  fill(place, chart.frame);
  chart.show(
    [
      {
        label: queue.name,
        steps: points.map((each) => each.votes),
        values: points.map((each) => each.accuracy),
        dots: true,
      },
    ],
    {},
  );
}

const FIELDS = {
  from_run: "The policy starts from",
  reward_steps: "Steps of the reward model",
  ppo_steps: "Steps of PPO",
};

function askTrain(page, queue) {
  const policies = page.runs
    .filter((run) => run.method === "ppo" && run.state !== "running")
    .map((run) => [run.id, run.name]);
  const from = choose([["", "the run that gave the answers"], ...policies], "", () => {});
  const reward = h("input", { type: "number", min: 1, max: 1000000, value: 60, required: true });
  const policy = h("input", { type: "number", min: 1, max: 1000000, value: 40, required: true });
  const send = async () => {
    const body = { queue_id: queue.id, reward_steps: Number(reward.value), ppo_steps: Number(policy.value) };
    if (from.value) body.from_run = Number(from.value);
    const made = await tried(() => post("train", body), FIELDS);
    if (made) notice(`${made.name} has started`);
    return made;
  };
  ask(
    { title: `Train from the votes of ${queue.name}`, action: "Train", send },
    h(
      "p",
      {},
      "First a reward model is trained on the votes, then PPO trains a policy against it. The votes that were used are listed in votes.json beside the run.",
    ),
    field(FIELDS.from_run, from),
    field(FIELDS.reward_steps, reward),
    field(FIELDS.ppo_steps, policy),
  );
}
