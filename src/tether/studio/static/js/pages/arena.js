// Arena: two models answer the same prompts, and whoever judges does not know which is which.

import { get, post } from "../api.js";
import { button, choose, field, fill, h, svg } from "../dom.js";
import { count, percent } from "../format.js";
import { bindPage } from "../keys.js";
import { jobsPanel } from "../jobs.js";
import { notice, tried } from "../notices.js";

export async function open(view) {
  const [{ runs }, { arenas }] = await Promise.all([get("runs"), get("arena")]);
  const page = { view, runs, arenas };
  page.list = h("div", { class: "queues" });
  fill(view.root,
    h("div", { class: "head" }, h("h1", { class: "grow" }, "Arena"), button("New match", () => askMatch(page), { key: "n", kind: "main" })),
    page.list, jobsPanel(view, { kinds: ["arena"], changed: () => tried(() => refresh(page)) }));
  draw(page);
  bindPage([{ key: "n", does: "New match", run: () => askMatch(page) }]);
}

async function refresh(page) {
  page.arenas = (await get("arena")).arenas;
  if (page.view.isOpen()) draw(page);
}

function draw(page) {
  fill(page.list, page.arenas.length ? page.arenas.map(card)
    : h("div", { class: "empty" }, "No matches yet. Two runs answer the same prompts, you choose blindly, and this page counts."));
}

function card(arena) {
  const rows = [["people", arena], ...(arena.judge ? [["judge", arena.judge]] : []), ...(arena.categories ?? []).map((each) => [each.name, each])];
  return h("section", { class: "panel queue" },
    h("div", { class: "row" }, h("h2", { class: "grow" }, arena.name), h("small", {}, `${arena.votes} of ${count(arena.items, "pair")} judged`)),
    h("p", {}, "How often ", h("b", {}, arena.run_b.name), " is preferred to ", h("b", {}, arena.run_a.name), ", with a 95 % interval:"),
    h("table", {}, h("tbody", {}, rows.map(([name, each]) => h("tr", {}, h("th", { scope: "row" }, name),
      h("td", {}, whisker(each)), h("td", { class: "figure" }, h("b", {}, percent(each.win_rate))),
      h("td", { class: "figure" }, h("small", {}, each.low === null || each.low === undefined ? "" : `${percent(each.low)} to ${percent(each.high)}`)),
      h("td", { class: "figure" }, h("small", {}, `${each.wins_b} : ${each.wins_a}, ${count(each.ties, "tie")}`)))))),
    h("div", { class: "row" }, h("a", { class: "button main", href: `#/label/${arena.queue_id}` }, "Judge blindly")));
}

/** The rate as a point on a line from 0 to 1, with its interval; the middle is marked. */
function whisker({ win_rate: rate, low, high }) {
  const x = (share) => 4 + share * 152;
  const known = rate !== null && rate !== undefined;
  return svg("svg", { class: "whisker", viewBox: "0 0 160 18", width: 160, height: 18, role: "img", "aria-label": percent(rate) },
    svg("path", { class: "base", d: "M4 9H156M80 3V15" }),
    known && low !== null && svg("path", { class: "range", d: `M${x(low)} 9H${x(high)}` }),
    known && svg("circle", { cx: x(rate), cy: 9, r: 4 }));
}

function askMatch(page) {
  const talkers = page.runs.filter((run) => run.method !== "reward" && run.step > 0);
  if (talkers.length < 2) {
    notice("A match needs two runs with models.", "error");
    return;
  }
  const options = talkers.map((run) => [run.id, run.name]);
  const judges = page.runs.filter((run) => run.method === "reward").map((run) => [run.id, run.name]);
  const [first, second] = [choose(options, options[1][0], () => {}), choose(options, options[0][0], () => {})];
  const prompts = h("textarea", { rows: 5, placeholder: "One prompt a line. Empty: prompts that both runs have seen." });
  const many = h("input", { type: "number", min: 1, max: 500, value: 20 });
  const judge = choose([["", "people alone"], ...judges], "", () => {});
  const dialog = h("dialog", { "aria-label": "New match" }, h("h2", {}, "New match"),
    h("form", { class: "stack", onsubmit: async (event) => {
      event.preventDefault();
      const lines = prompts.value.split("\n").map((line) => line.trim()).filter(Boolean);
      const body = { run_a: Number(first.value), run_b: Number(second.value), ...(lines.length ? { prompts: lines.map((prompt) => ({ prompt })) } : { count: Number(many.value) }) };
      if (judge.value) body.judge = Number(judge.value);
      const made = await tried(() => post("arena", body));
      if (!made) return;
      dialog.close();
      notice("The match is being prepared");
      await tried(() => refresh(page));
    } }, field("This run", first), field("Against", second), field("Prompts", prompts), field("How many, if none are written", many), field("Judged by", judge),
    h("div", { class: "row" }, h("button", { class: "main" }, "Begin"), button("Cancel", () => dialog.close()))));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  first.focus();
}
