// Judge one item after another. A vote is shown as saved only after the server has acknowledged it.

import { plainKey, plainToggle, promptBox, textBox } from "./answer_text.js";
import { get, pause, post, uid } from "./api.js";
import { button, fill, h } from "./dom.js";
import { bindPage } from "./keys.js";
import { notice, tried } from "./notices.js";
import { emptyState } from "./parts.js";
import { demonstrationTask, pairTask, rankingTask } from "./tasks.js";
import { commentBox, ratingPanel } from "./vote_extras.js";

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
      plainToggle(),
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
        queue.guidelines
          ? textBox(queue.guidelines)
          : h("p", {}, "There are none. Choose the answer that you would prefer."),
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
    fill(
      page.place,
      emptyState("All done: nothing is left in this queue for you.", h("a", { class: "button main", href: "#/label" }, "Back to the queues")),
    );
    bindPage([undoKey(page), plainKey]);
    page.view.root.dataset.item = "none";
    return;
  }
  const axes = found.queue.axes ?? [];
  if (axes.length) found.item.ratings = found.item.answers.map((_, at) => ratingPanel(axes, `answer ${at + 1}`));
  page.comment = commentBox();
  const task = TASKS[found.item.kind](found.item, (choice) => cast(page, choice));
  fill(page.place, promptBox(found.item.prompt), task.box, commentLine(page));
  bindPage([...task.keys, ...extraKeys(page), undoKey(page), plainKey]);
  task.begin?.();
  page.view.root.dataset.item = found.item.id;
}

function commentLine(page) {
  return h("label", { class: "comment-line" }, h("kbd", {}, "w"), page.comment);
}

function extraKeys(page) {
  const rate = page.item.ratings?.[0]?.first;
  return [
    ...(rate ? [{ key: "r", does: "Rate: digits 1 to 7, then the next axis; Escape leaves", run: () => rate.focus() }] : []),
    { key: "w", does: "Write a comment; Escape leaves it", run: () => page.comment.focus() },
  ];
}

function undoKey(page) {
  return { key: "u", does: "Undo the last vote", run: () => undo(page) };
}

/** Send the vote until it is acknowledged: with the same client_uid it is stored once. */
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
    comment: page.comment.value.trim() || null,
    ratings: page.item.ratings ? page.item.ratings.map((each) => each.value()) : null,
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
