// Label: the queues, and in a queue one item after another, each decided with one key.

import { get, post } from "../api.js";
import { button, field, fill, h } from "../dom.js";
import { count, number } from "../format.js";
import { bindPage } from "../keys.js";
import { notice, tried } from "../notices.js";
import { emptyState } from "../parts.js";
import { queueTools, raterTools } from "../queue_tools.js";
import { axisBoxes } from "../item_dialogs.js";
import { openQueue } from "../judging.js";
import { openItems } from "../label_items.js";
import { sessionTools } from "../sessions.js";

export async function open(view) {
  if (view.parts[2] === "items" && view.me.role === "owner") await openItems(view, view.parts[1]);
  else if (view.parts.length > 1) await openQueue(view, view.parts[1]);
  else await openQueues(view);
}

async function openQueues(view) {
  const { queues } = await get("label/queues");
  if (view.me.role === "annotator" && queues.length === 1) {
    location.replace(`#/label/${queues[0].id}`);
    return;
  }
  const isOwner = view.me.role === "owner";
  const sessions = isOwner && sessionTools();
  if (sessions) view.onClose(sessions.close);
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
      isOwner && queues.length > 0 && button("New queue", () => askQueue(), { key: "n", kind: "main" }),
    ),
    queues.length
      ? list
      : isOwner
        ? emptyState(
            "A queue holds items for people to judge: pairs, rankings, or prompts to answer. There is none yet.",
            button("Make a queue", () => askQueue(), { key: "n", kind: "main" }),
          )
        : emptyState("There is nothing to label now.", button("Look again", () => location.reload(), { kind: "main" })),
    isOwner && queues.length > 0 && raterTools(queues),
    sessions && sessions.section,
  );
  let at = 0;
  const links = [...list.querySelectorAll("a.queue-name")];
  const move = (by) => {
    at = Math.max(0, Math.min(links.length - 1, at + by));
    links[at]?.focus();
  };
  bindPage([
    { key: ["j", "ArrowDown"], does: "Next queue", run: () => move(document.activeElement === links[at] ? 1 : 0) },
    { key: ["k", "ArrowUp"], does: "Previous queue", run: () => move(-1) },
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
  if (isOwner && queue.kind !== "demonstration") showAgreement(queue, agreement);
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
      "consistency ",
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
  const axes = axisBoxes();
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
          const rated = kind.value === "demonstration" ? [] : axes.value();
          const body = { name: name.value, kind: kind.value, guidelines: guidelines.value, axes: rated };
          const made = await tried(() => post("label/queues", body));
          if (!made) return;
          dialog.close();
          notice(`${body.name} was created. Fill it with items next.`);
          dispatchEvent(new HashChangeEvent("hashchange"));
        },
      },
      field("Name", name),
      field("What is judged", kind),
      field("Guidelines for raters", guidelines, "Shown beside every item."),
      axes.box,
      h(
        "div",
        { class: "row" },
        h("button", { class: "main" }, "Make the queue"),
        button("Cancel", () => dialog.close()),
      ),
    ),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  name.focus();
}
