// Label: the queues, and in a queue one item after another, each decided with one key.

import { get, post } from "../api.js";
import { button, field, fill, h } from "../dom.js";
import { count, number } from "../format.js";
import { bindPage } from "../keys.js";
import { notice, tried } from "../notices.js";
import { queueTools, raterTools } from "../queue_tools.js";
import { openQueue } from "../judging.js";

export async function open(view) {
  if (view.parts.length > 1) await openQueue(view, view.parts[1]);
  else await openQueues(view);
}

async function openQueues(view) {
  const { queues } = await get("label/queues");
  if (view.me.role === "annotator" && queues.length === 1) {
    location.replace(`#/label/${queues[0].id}`);
    return;
  }
  const isOwner = view.me.role === "owner";
  const list = h(
    "ol",
    { class: "queues" },
    queues.map((queue) => queueCard(queue, isOwner)),
  );
  fill(
    view.root,
    h(
      "div",
      { class: "head" },
      h("h1", { class: "grow" }, "Label"),
      isOwner && button("New queue", () => askQueue(), { key: "n", kind: "main" }),
    ),
    queues.length
      ? list
      : h(
          "div",
          { class: "empty" },
          isOwner
            ? "No queues yet. A queue holds what people are to judge: pairs, rankings, or prompts that want an answer."
            : "There is nothing to label now.",
        ),
    isOwner && raterTools(queues),
  );
  let at = 0;
  const links = [...list.querySelectorAll("a.queue-name")];
  const move = (by) => {
    at = Math.max(0, Math.min(links.length - 1, at + by));
    links[at]?.focus();
  };
  bindPage([
    { key: ["j", "ArrowDown"], does: "Next queue", run: () => move(document.activeElement === links[at] ? 1 : 0) },
    { key: ["k", "ArrowUp"], does: "Queue before", run: () => move(-1) },
    {
      key: "Enter",
      does: "Judge",
      run: () => {
        if (links[at]) location.hash = links[at].getAttribute("href");
      },
    },
    ...(isOwner ? [{ key: "n", does: "New queue", run: () => askQueue() }] : []),
  ]);
}

function queueCard(queue, isOwner) {
  const agreement = h("span", { class: "agreement" });
  if (isOwner) showAgreement(queue, agreement);
  const total = queue.items ?? 0;
  const votes = queue.votes ?? 0;
  return h(
    "li",
    { class: "panel queue" },
    h(
      "div",
      { class: "row" },
      h("a", { class: "queue-name", href: `#/label/${queue.id}` }, queue.name),
      h("small", {}, queue.kind),
      h("span", { class: "grow" }),
      h("small", {}, `${count(total, "item")}, ${count(votes, "vote")}`),
      h("small", {}, queue.open ? `${queue.remaining} left for you` : "closed"),
    ),
    agreement,
    isOwner && queueTools(queue),
  );
}

async function showAgreement(queue, place) {
  const found = await get(`label/queues/${queue.id}/agreement`).catch(() => null);
  if (!found) return;
  fill(
    place,
    h(
      "span",
      { title: "Krippendorff's alpha: 1 is full agreement, 0 is chance" },
      "agreement ",
      h("b", {}, number(found.alpha)),
    ),
    h(
      "span",
      { title: "Share of repeated items that were judged the same again" },
      "same again ",
      h("b", {}, number(found.consistency)),
    ),
    h("span", {}, count(found.raters.length, "rater")),
  );
}

function askQueue() {
  const name = h("input", { required: true, maxlength: 200 });
  const kind = h(
    "select",
    {},
    ["pair", "ranking", "demonstration"].map((each) => h("option", { value: each }, each)),
  );
  const guidelines = h("textarea", { rows: 5, placeholder: "Prefer the answer that …" });
  const dialog = h(
    "dialog",
    { "aria-label": "New queue" },
    h("h2", {}, "New queue"),
    h(
      "form",
      {
        class: "stack",
        onsubmit: async (event) => {
          event.preventDefault();
          const body = { name: name.value, kind: kind.value, guidelines: guidelines.value };
          const made = await tried(() => post("label/queues", body));
          if (!made) return;
          dialog.close();
          notice(`${body.name} is made. Fill it next.`);
          dispatchEvent(new HashChangeEvent("hashchange"));
        },
      },
      field("Name", name),
      field("What is judged", kind),
      field("Guidelines for raters", guidelines, "Shown beside every item."),
      h(
        "div",
        { class: "row" },
        h("button", { class: "main" }, "Make it"),
        button("Cancel", () => dialog.close()),
      ),
    ),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  name.focus();
}
