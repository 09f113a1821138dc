// Dialogs of the list of items: assignment, gold, tags; and the settings of a queue.

import { get, post } from "./api.js";
import { button, choose, field, h } from "./dom.js";
import { count } from "./format.js";
import { notice, tried } from "./notices.js";
import { linkButtons } from "./sessions.js";

const AXES = ["overall", "coverage", "accuracy", "coherence"];

/** A dialog with a form; it closes if `send` returns a truthy value. */
function ask(title, action, send, ...parts) {
  const main = h("button", { class: "main" }, action);
  const dialog = h(
    "dialog",
    { "aria-label": title },
    h("h2", {}, title),
    h(
      "form",
      {
        class: "stack",
        onsubmit: async (event) => {
          event.preventDefault();
          main.disabled = true;
          const done = await send();
          main.disabled = false;
          if (done) dialog.close();
        },
      },
      ...parts,
      h("div", { class: "row" }, main, button("Cancel", () => dialog.close())),
    ),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  (dialog.querySelector("input, select, textarea") ?? main).focus();
}

/** Assign the chosen items, or all, to people. */
export function askAssign(page, done) {
  const people = page.raters.filter((each) => each.enters && (each.queue_id === null || each.queue_id === page.queue.id));
  const boxes = people.map((each) => [each, h("input", { type: "checkbox" })]);
  const each = h("input", { type: "number", min: 1, max: 200, placeholder: "all of them" });
  const many = page.chosen.size ? `${count(page.chosen.size, "chosen item")}` : "All items";
  const send = async () => {
    const raters = boxes.filter(([, box]) => box.checked).map(([person]) => person.id);
    const body = { items: [...page.chosen], raters, each: each.value ? Number(each.value) : null };
    const made = await tried(() => post(`label/queues/${page.queue.id}/assign`, body));
    if (!made) return false;
    notice(raters.length ? `${made.items} items are assigned.` : `${made.items} items are for everyone again.`);
    done();
    return true;
  };
  ask(
    "Assign items",
    "Assign",
    send,
    h("p", {}, `${many} will be shown only to these people. Choose no one to show them to everyone.`),
    h("div", { class: "checks" }, boxes.map(([person, box]) => h("label", { class: "inline" }, box, person.name))),
    people.length === 0 && h("p", {}, "There is no annotator yet: invite one on the Label page."),
    field("People for each item, in turn", each, "With fewer than all, items are shared out evenly."),
  );
}

/** Set the correct order of an item's answers. */
export function askGold(item, done) {
  if (item.kind === "demonstration") return;
  const ranks = item.answers.map((_, place) =>
    choose(
      item.answers.map((__, rank) => [rank, rank === 0 ? "1, best" : String(rank + 1)]),
      item.gold?.[place] ?? Math.min(place, item.answers.length - 1),
      () => {},
    ),
  );
  const keep = h("input", { type: "checkbox", checked: true });
  const send = async () => {
    const body = { ranks: keep.checked ? ranks.map((each) => Number(each.value)) : null };
    const made = await tried(() => post(`label/items/${item.id}/gold`, body));
    if (made) done();
    return made;
  };
  ask(
    "Gold item",
    "Save",
    send,
    h("p", {}, "A gold item has a known correct order. It tests annotators, who cannot tell it from other items, and is not used for training."),
    h("label", { class: "inline" }, keep, "This is a gold item"),
    item.answers.map((answer, place) => field(`Rank of ${answer.text.slice(0, 80) || "(nothing)"}`, ranks[place])),
  );
}

export function askTags(item, done) {
  const tags = h("input", { value: item.tags.join(", "), maxlength: 1000 });
  const send = async () => {
    const words = tags.value.split(",").map((tag) => tag.trim()).filter(Boolean);
    const made = await tried(() => post(`label/items/${item.id}/tags`, { tags: words }));
    if (made) done();
    return made;
  };
  ask("Tags", "Save", send, field("Tags, separated by commas", tags));
}

/** The settings of a queue. */
export function askSettings(queue) {
  const name = h("input", { value: queue.name, required: true, maxlength: 200 });
  const guidelines = h("textarea", { rows: 5, value: queue.guidelines });
  const axes = axisBoxes(queue.axes);
  const votes = h("input", { type: "number", min: 0, max: 1000, value: queue.votes_per_item ?? 0 });
  const gold = h("input", { type: "number", min: 0, max: 1, step: 0.05, value: queue.gold_accuracy });
  const send = async () => {
    const body = { name: name.value, guidelines: guidelines.value, axes: axes.value(), gold_accuracy: Number(gold.value) };
    const made = await tried(() => post(`label/queues/${queue.id}`, { ...body, votes_per_item: Number(votes.value) }));
    if (made) dispatchEvent(new HashChangeEvent("hashchange"));
    return made;
  };
  ask(
    `Settings of ${queue.name}`,
    "Save",
    send,
    field("Name", name),
    field("Guidelines for annotators", guidelines, "Shown beside every item, as Markdown."),
    queue.kind !== "demonstration" && axes.box,
    field("Votes for each item", votes, "0: everyone judges everything."),
    queue.kind !== "demonstration" &&
      field("Flag annotators below this accuracy on gold items", gold, "Once they have judged three of them."),
  );
}

/** The axes on which answers are rated. */
export function axisBoxes(chosen = []) {
  const boxes = AXES.map((axis) => [axis, h("input", { type: "checkbox", checked: chosen.includes(axis) })]);
  return {
    box: h(
      "fieldset",
      {},
      h("legend", { class: "field-name" }, "Ratings from 1 to 7"),
      h("div", { class: "checks" }, boxes.map(([axis, box]) => h("label", { class: "inline" }, box, axis))),
    ),
    value: () => boxes.filter(([, box]) => box.checked).map(([axis]) => axis),
  };
}

/** For each annotator: their votes, their accuracy on gold items, and whether they are excluded. */
export async function peopleList(queues) {
  const [{ raters }, ...told] = await Promise.all([
    get("raters"),
    ...queues.map((queue) => get(`label/queues/${queue.id}/agreement`).catch(() => ({ raters: [] }))),
  ]);
  const gold = {};
  for (const each of told.flatMap((one) => one.raters)) {
    if (!each.gold) continue;
    const known = (gold[each.id] ??= { votes: 0, right: 0, flagged: false });
    known.votes += each.gold.votes;
    known.right += each.gold.votes * each.gold.accuracy;
    known.flagged ||= each.gold.flagged;
  }
  return raters.map((person) => personLine(person, gold[person.id]));
}

function personLine(person, gold) {
  const line = h("li", {});
  const change = async () => {
    const made = await tried(() => post(`raters/${person.id}`, { excluded: !person.excluded }));
    if (made) line.replaceWith(personLine({ ...person, excluded: made.excluded }, gold));
  };
  line.append(
    h("b", {}, person.name),
    h("small", {}, `${person.role}, ${person.votes} vote${person.votes === 1 ? "" : "s"}`),
  );
  if (gold) {
    const words = `${Math.round((100 * gold.right) / gold.votes)} % right on ${gold.votes} gold`;
    line.append(h("small", { class: gold.flagged ? "flagged" : "" }, gold.flagged ? `${words}: below the limit` : words));
  }
  if (person.excluded) line.append(h("small", { class: "flagged" }, "excluded"));
  if (person.revoked) line.append(h("small", { class: "flagged" }, "link revoked"));
  if (person.role !== "owner" || person.votes > 0) {
    line.append(
      button(person.excluded ? "Include" : "Exclude", change, {
        kind: "quiet",
        title: person.excluded
          ? "Use their votes in training and export again"
          : "Leave their votes out of training and export",
      }),
    );
  }
  line.append(...linkButtons(person, (now) => line.replaceWith(personLine(now, gold))));
  return line;
}
