// Judging one item after another. A vote counts as cast when the server has said so, and not before.

import { get, pause, post, uid } from "./api.js";
import { button, fill, h } from "./dom.js";
import { bindPage } from "./keys.js";
import { notice, tried } from "./notices.js";
import { demonstrationTask, pairTask, rankingTask } from "./tasks.js";

const TASKS = { pair: pairTask, ranking: rankingTask, demonstration: demonstrationTask };

export async function openQueue(view, id) {
  const { queue } = await get(`label/queues/${encodeURIComponent(id)}/next`);
  const page = { view, queue, item: null, since: 0, busy: false };
  page.left = h("small", { role: "status" });
  page.place = h("div", { class: "task" });
  page.saved = h("small", { class: "saved", role: "status", "aria-live": "polite" });
  fill(
    view.root,
    h(
      "div",
      { class: "head" },
      h("h1", {}, h("a", { href: "#/label" }, "Label")),
      h("b", {}, queue.name),
      page.left,
      h("span", { class: "grow" }),
      page.saved,
      button("Undo", () => undo(page), { key: "u" }),
    ),
    h(
      "div",
      { class: "judging" },
      page.place,
      h(
        "aside",
        { class: "panel guidelines" },
        h("h2", {}, "Guidelines"),
        h("p", {}, queue.guidelines || "None were written. Choose what you would rather be given."),
      ),
    ),
  );
  await next(page);
}

async function next(page) {
  const found = await get(`label/queues/${page.queue.id}/next`);
  if (!page.view.isOpen()) return;
  page.item = found.item;
  page.since = performance.now();
  page.left.textContent = found.item ? `${found.remaining} left, ${found.done} done` : `${found.done ?? 0} done`;
  if (!found.item) {
    fill(page.place, h("div", { class: "empty" }, h("h2", {}, "All done"), "Nothing is left in this queue for you."));
    bindPage([undoKey(page)]);
    page.view.root.dataset.item = "none";
    return;
  }
  const task = TASKS[found.item.kind](found.item, (choice) => cast(page, choice));
  fill(page.place, promptOf(found.item.prompt), task.box);
  bindPage([...task.keys, undoKey(page)]);
  task.begin?.();
  page.view.root.dataset.item = found.item.id;
}

function undoKey(page) {
  return { key: "u", does: "Undo the last vote", run: () => undo(page) };
}

/** Send the vote until it is acknowledged: the same client_uid makes sending it twice harmless. */
async function cast(page, choice) {
  if (page.busy || !page.item) return;
  page.busy = true;
  page.place.classList.add("sending");
  const seconds = Math.round((performance.now() - page.since) / 10) / 100;
  const vote = {
    client_uid: uid(),
    item_id: page.item.id,
    order: page.item.order,
    seconds,
    ...(choice.skip ? { skip: true, choice: "" } : { choice }),
  };
  try {
    for (let wait = 500; ; wait = Math.min(8000, wait * 2)) {
      try {
        await post("label/votes", vote);
        break;
      } catch (error) {
        if (error.status !== 0 && error.status !== 429 && error.status < 500) throw error;
        page.saved.textContent = "not saved yet, trying again";
        await pause(wait);
        if (!page.view.isOpen()) return;
      }
    }
    page.saved.textContent = choice === "skip" || choice.skip ? "skipped" : "saved";
    await next(page);
  } catch (error) {
    notice(error.message, "error");
  } finally {
    page.busy = false;
    page.place.classList.remove("sending");
  }
}

async function undo(page) {
  if (page.busy) return;
  const undone = await tried(() => post("label/votes/undo", { queue_id: page.queue.id }));
  if (!undone) return;
  page.saved.textContent = undone.item_id === null ? "nothing to undo" : "undone";
  if (undone.item_id !== null) await tried(() => next(page));
}

/** A prompt is a text, or a list of messages. */
export function promptOf(prompt) {
  const messages =
    typeof prompt === "string"
      ? [{ role: "prompt", content: prompt }]
      : Array.isArray(prompt)
        ? prompt
        : (prompt.messages ?? [{ role: "prompt", content: prompt.text ?? JSON.stringify(prompt) }]);
  return h(
    "div",
    { class: "prompt" },
    messages.map((each) => h("div", {}, h("small", {}, each.role), h("p", { class: "text" }, each.content))),
  );
}
