// The items of a queue for its owner: their votes, filters, assignment, gold and tags.

import { plainKey, plainToggle, promptBox, textBox, cutMark } from "./answer_text.js";
import { get, post } from "./api.js";
import { button, choose, debounced, field, fill, h } from "./dom.js";
import { count, number, percent } from "./format.js";
import { askAssign, askGold, askTags } from "./item_dialogs.js";
import { bindPage } from "./keys.js";
import { tried } from "./notices.js";

const A_PAGE = 50;
const STATUSES = [
  ["any", "any"],
  ["open", "no vote yet"],
  ["judged", "needs more votes"],
  ["done", "done"],
  ["skipped", "only skipped"],
];

export async function openItems(view, id) {
  const [{ queues }, { raters }] = await Promise.all([get("label/queues"), get("raters")]);
  const queue = queues.find((each) => String(each.id) === String(id));
  if (!queue) throw new Error(`There is no queue ${id}.`);
  const page = { view, queue, raters, at: 0, offset: 0, items: [], chosen: new Set() };
  page.filters = { status: "any", rater: "", gold: "any", disagreement: false, tag: "", text: "" };
  page.found = h("small", { role: "status" });
  page.list = h("ol", { class: "items" });
  page.more = h("div", { class: "row choices" });
  page.tools = h("div", { class: "row" });
  page.bar = h("form", { class: "item-filters", onsubmit: (event) => event.preventDefault() });
  fill(
    view.root,
    h(
      "div",
      { class: "head" },
      h("h1", {}, h("a", { href: "#/label" }, "Label")),
      h("b", {}, queue.name),
      page.found,
      h("span", { class: "grow" }),
      plainToggle(),
      h("a", { class: "button main", href: `#/label/${queue.id}` }, "Judge"),
    ),
    page.bar,
    page.tools,
    page.list,
    page.more,
  );
  drawFilters(page, {});
  bindKeys(page);
  await load(page);
}

function bindKeys(page) {
  const here = () => page.items[page.at];
  bindPage([
    { key: ["j", "ArrowDown"], does: "Next item", run: () => move(page, 1) },
    { key: ["k", "ArrowUp"], does: "Previous item", run: () => move(page, -1) },
    { key: "Enter", does: "Show the whole item, or less of it", run: () => toggle(page) },
    { key: "x", does: "Choose the item", run: () => here() && choosing(page, here().id) },
    { key: "X", does: "Choose all listed items", run: () => chooseAll(page) },
    { key: "a", does: "Assign the chosen items", run: () => askAssign(page, () => load(page)) },
    { key: "o", does: "Mark as gold", run: () => here() && askGold(here(), () => load(page)) },
    { key: "t", does: "Tags", run: () => here() && askTags(here(), () => load(page)) },
    { key: "/", does: "Search", run: () => page.search.focus() },
    plainKey,
  ]);
}

function drawFilters(page, tags) {
  const { filters } = page;
  const set = (name) => (value) => {
    filters[name] = value;
    tried(() => load(page));
  };
  const people = page.raters.map((each) => [each.id, each.name]);
  page.search ??= h("input", {
    type: "search",
    placeholder: "In prompts, answers and comments",
    oninput: debounced(250, (event) => set("text")(event.target.value)),
  });
  const isFocused = document.activeElement === page.search;
  fill(
    page.bar,
    h("label", { class: "field search" }, h("span", { class: "field-name" }, "Text"), page.search),
    field("Status", choose(STATUSES, filters.status, set("status"))),
    field("Annotator", choose([["", "anyone"], ...people], filters.rater, set("rater"))),
    field("Tag", choose([["", "any"], ...Object.entries(tags).map(([tag, n]) => [tag, `${tag} (${n})`])], filters.tag, set("tag"))),
    field("Gold", choose([["any", "any"], ["yes", "gold"], ["no", "not gold"]], filters.gold, set("gold"))),
    h(
      "label",
      { class: "inline" },
      h("input", {
        type: "checkbox",
        checked: filters.disagreement,
        onchange: (event) => set("disagreement")(event.target.checked),
      }),
      "only where votes differ",
    ),
  );
  if (isFocused) page.search.focus();
}

async function load(page, more = false) {
  page.offset = more ? page.items.length : 0;
  const query = { ...page.filters, limit: A_PAGE, offset: page.offset };
  const found = await tried(() => get(`label/queues/${page.queue.id}/items`, query));
  if (!found || !page.view.isOpen()) return;
  page.items = more ? [...page.items, ...found.items] : found.items;
  page.total = found.total;
  page.found.textContent = found.total === found.of ? count(found.of, "item") : `${found.total} of ${count(found.of, "item")}`;
  drawFilters(page, found.tags);
  draw(page);
}

function draw(page) {
  const opened = new Set([...page.list.querySelectorAll("details[open]")].map((each) => each.dataset.item));
  fill(
    page.list,
    page.items.length
      ? page.items.map((item) => itemCard(page, item, opened.has(String(item.id))))
      : h("li", { class: "empty" }, page.filters.text || page.queue.items ? "No item matches." : "This queue has no items yet. Fill it on the Label page."),
  );
  fill(page.more, page.items.length < page.total && button("Show more", () => load(page, true)));
  drawTools(page);
  move(page, 0);
}

function drawTools(page) {
  const many = page.chosen.size;
  fill(
    page.tools,
    button(many ? `Assign ${count(many, "item")}` : "Assign all items", () => askAssign(page, () => load(page)), { key: "a" }),
    button("Choose all listed", () => chooseAll(page), { key: "X" }),
    many > 0 &&
      button("Choose none", () => {
        page.chosen.clear();
        draw(page);
      }),
  );
}

function chooseAll(page) {
  for (const item of page.items) page.chosen.add(item.id);
  draw(page);
}

function choosing(page, id) {
  if (!page.chosen.delete(id)) page.chosen.add(id);
  const box = page.list.querySelector(`[data-choose="${id}"]`);
  if (box) box.checked = page.chosen.has(id);
  drawTools(page);
}

function move(page, by) {
  page.at = Math.max(0, Math.min(page.items.length - 1, page.at + by));
  [...page.list.children].forEach((card, place) => card.classList.toggle("at", place === page.at && page.items.length > 0));
  if (by) page.list.children[page.at]?.scrollIntoView({ block: "nearest" });
}

function toggle(page) {
  const details = page.list.children[page.at]?.querySelector("details");
  if (details) details.open = !details.open;
}

function itemCard(page, item, isOpen) {
  const names = Object.fromEntries(page.raters.map((each) => [each.id, each.name]));
  const asked = item.prompt.at(-1)?.content ?? "";
  const inside = h("div", {});
  const details = h(
    "details",
    {
      "data-item": item.id,
      ontoggle: () => details.open && !inside.firstChild && fill(inside, whole(item)),
    },
    h("summary", {}, h("span", { class: "excerpt" }, asked)),
    inside,
  );
  details.open = isOpen;
  return h(
    "li",
    { class: "panel item" },
    h("input", {
      type: "checkbox",
      "aria-label": `Choose item ${item.id}`,
      "data-choose": item.id,
      checked: page.chosen.has(item.id),
      onchange: () => choosing(page, item.id),
    }),
    h(
      "div",
      { class: "item-body" },
      details,
      h(
        "div",
        { class: "item-facts" },
        h("span", { class: `badge ${item.status}` }, STATUSES.find(([name]) => name === item.status)?.[1] ?? item.status),
        h("span", {}, count(item.votes.length, "vote")),
        item.disagreement > 0 && h("span", { class: "badge divided", title: `${percent(item.disagreement)} of the comparisons differ` }, "votes differ"),
        item.gold && h("span", { class: "badge gold" }, "gold"),
        item.repeat_of && h("span", { class: "badge" }, `repeats ${item.repeat_of}`),
        item.tags.map((tag) => h("span", { class: "badge" }, tag)),
        item.assigned.length > 0 && h("span", {}, `for ${item.assigned.map((id) => names[id] ?? id).join(", ")}`),
        h("span", { class: "grow" }),
        item.kind !== "demonstration" &&
          button(item.gold ? "Gold…" : "Make gold", () => askGold(item, () => load(page)), { kind: "quiet" }),
        button("Tags", () => askTags(item, () => load(page)), { kind: "quiet" }),
      ),
    ),
  );
}

/** The prompt, each answer with its ratings, and every vote. */
function whole(item) {
  return [
    promptBox(item.prompt),
    item.answers.length > 0 &&
      h(
        "ol",
        { class: "item-answers" },
        item.answers.map((answer, place) =>
          h(
            "li",
            {},
            h("span", { class: "figure" }, `${letter(place)}${item.gold ? ` #${item.gold[place] + 1}` : ""}`),
            h("div", {}, cutMark(answer), textBox(answer.text), answer.source && h("small", {}, sourceWords(answer.source))),
          ),
        ),
      ),
    h("ul", { class: "item-votes" }, item.votes.length ? item.votes.map((vote) => voteLine(vote)) : h("li", {}, "No vote yet.")),
  ];
}

export function letter(place) {
  return String.fromCharCode(65 + place);
}

function sourceWords(source) {
  const parts = [source.run ?? source.model, source.step !== undefined && `step ${source.step}`];
  if (typeof source.score === "number") parts.push(`scored ${number(source.score)}`);
  return parts.filter(Boolean).join(", ");
}

function voteLine(vote) {
  return h(
    "li",
    {},
    h("b", {}, vote.rater, vote.excluded && h("small", {}, " (excluded)")),
    h("span", {}, saying(vote)),
    vote.ratings && h("small", {}, ratingWords(vote.ratings)),
    vote.comment && h("span", {}, `“${vote.comment}”`),
    vote.seconds !== null && h("small", {}, `${number(vote.seconds)} s`),
  );
}

/** "A > B = C" */
function saying(vote) {
  if (vote.written !== null) return vote.written;
  if (vote.skipped) return "skipped";
  if (vote.both_bad) return "both bad";
  const order = vote.ranks.map((rank, place) => [rank, place]).toSorted((a, b) => a[0] - b[0] || a[1] - b[1]);
  return order
    .map(([rank, place], at) => (at === 0 ? "" : rank === order[at - 1][0] ? " = " : " > ") + letter(place))
    .join("");
}

function ratingWords(ratings) {
  return ratings
    .map((each, place) => {
      const words = Object.entries(each).map(([axis, value]) => `${axis} ${value}`);
      return words.length ? `${letter(place)}: ${words.join(", ")}` : "";
    })
    .filter(Boolean)
    .join("; ");
}
