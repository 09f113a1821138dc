// Arena: two models answer the same prompts, and raters do not know which is which.

import { get, post } from "../api.js";
import { ask } from "../dialogs.js";
import { button, choose, field, fill, h, svg } from "../dom.js";
import { count, percent } from "../format.js";
import { bindPage } from "../keys.js";
import { notice, tried } from "../notices.js";
import { emptyState, howItWorks } from "../parts.js";

export async function open(view) {
  const page = { view, runs: (await get("runs")).runs, arenas: [] };
  page.list = h("div", { class: "queues" });
  page.make = button("New match", () => askMatch(page), { key: "n", kind: "main" });
  fill(view.root, h("div", { class: "head" }, h("h1", { class: "grow" }, "Arena"), page.make), page.list, (page.how = h("div", {})));
  bindPage([{ key: "n", does: "New match", run: () => askMatch(page) }]);
  await refresh(page);
}

async function refresh(page) {
  const { arenas } = await get("arena");
  page.arenas = await Promise.all(
    arenas.toReversed().map(async (arena) => ({ ...arena, ...(await get(`arena/${arena.queue_id}`)) })),
  );
  if (page.view.isOpen()) draw(page);
}

function draw(page) {
  page.make.hidden = page.arenas.length === 0; // the button in the empty page does it
  fill(page.how, page.arenas.length > 0 && page.arenas.length < 3 && how());
  fill(page.list, page.arenas.length ? page.arenas.map((arena) => card(page, arena)) : nothingYet(page));
}

function nothingYet(page) {
  if (players(page).length < 2)
    return emptyState(
      "A match compares the answers of two trained models, and this workspace has fewer than two.",
      h("a", { class: "button main", href: "#/start" }, "Train a model"),
    );
  return emptyState(
    "In a match two models answer the same prompts, and you choose the better answer without knowing whose it is.",
    button("Start a match", () => askMatch(page), { key: "n", kind: "main" }),
  );
}

function how() {
  return howItWorks(
    "How a match works",
    ["Answer", "Both models answer the same prompts. You write the prompts, or take those that a run kept."],
    ["Judge", "You see two answers in a random order and choose the better one. The names stay hidden."],
    ["Count", "The win rate and its interval say how sure the result is: more votes make the interval narrower."],
  );
}

/** The runs that can answer. */
function players(page) {
  return page.runs.filter((run) => run.method !== "reward" && run.step > 0);
}

function card(page, arena) {
  const rows = [["all", arena], ...arena.categories.map((each) => [each.name, each])];
  const judges = page.runs.filter((run) => run.method === "reward").map((run) => [run.id, run.name]);
  return h(
    "section",
    { class: "panel queue" },
    h(
      "div",
      { class: "row" },
      h("h2", { class: "grow" }, arena.name),
      h("small", {}, `${count(arena.votes, "vote")} on ${count(arena.items, "pair")}`),
    ),
    h(
      "p",
      {},
      "How often ",
      h("b", {}, arena.run_a),
      " is preferred to ",
      h("b", {}, arena.run_b),
      " (a tie counts as half), with a 95 % interval:",
    ),
    h(
      "div",
      { class: "wide" },
      h(
        "table",
        {},
        h(
          "tbody",
          {},
          rows.map(([name, each]) =>
            h(
              "tr",
              {},
              h("th", { scope: "row" }, name),
              h("td", {}, whisker(each)),
              h("td", { class: "figure" }, h("b", {}, percent(each.win_rate))),
              h(
                "td",
                { class: "figure" },
                h("small", {}, each.low === null ? "" : `${percent(each.low)} to ${percent(each.high)}`),
              ),
              h("td", { class: "figure" }, h("small", {}, count(each.votes, "vote"))),
            ),
          ),
        ),
      ),
    ),
    arena.votes > 0 &&
      h(
        "small",
        {},
        `${arena.run_a} won ${arena.wins_a}, ${arena.run_b} won ${arena.wins_b}, ${count(arena.ties, "tie")}, both bad ${arena.both_bad}`,
      ),
    h(
      "div",
      { class: "row" },
      h("a", { class: "button main", href: `#/label/${arena.queue_id}` }, "Judge blind"),
      judges.length > 0 &&
        choose([["", "Let a reward model judge…"], ...judges], "", (run) => run && letJudge(page, arena, Number(run)), {
          "aria-label": "Let a reward model judge",
        }),
    ),
  );
}

async function letJudge(page, arena, run) {
  const told = await tried(() => post(`arena/${arena.queue_id}/judge`, { reward_run: run }));
  if (!told) return;
  notice(`The reward model cast ${count(told.votes, "vote")}`);
  await tried(() => refresh(page));
}

/** The win rate as a point on a line from 0 to 1, with its interval; the middle is marked. */
function whisker({ win_rate: rate, low, high }) {
  const x = (share) => 4 + share * 152;
  const known = rate !== null;
  return svg(
    "svg",
    { class: "whisker", viewBox: "0 0 160 18", width: 160, height: 18, role: "img", "aria-label": percent(rate) },
    svg("path", { class: "base", d: "M4 9H156M80 3V15" }),
    known && svg("path", { class: "range", d: `M${x(low)} 9H${x(high)}` }),
    known && svg("circle", { cx: x(rate), cy: 9, r: 4 }),
  );
}

function askMatch(page) {
  const options = players(page).map((run) => [run.id, run.name]);
  if (options.length < 2) {
    notice("A match needs two runs with models.", "error");
    return;
  }
  const [first, second] = [choose(options, options[1][0], () => {}), choose(options, options[0][0], () => {})];
  const prompts = h("textarea", { rows: 5, placeholder: "One prompt per line. Empty: prompts that the first run kept." });
  const many = h("input", { type: "number", min: 1, max: 500, value: 20 });
  const send = async () => {
    const lines = prompts.value
      .split("\n")
      .map((line) => line.trim())
      .filter(Boolean);
    const body = {
      run_a: Number(first.value),
      run_b: Number(second.value),
      ...(lines.length ? { prompts: lines.map((prompt) => ({ prompt })) } : { count: Number(many.value) }),
    };
    const made = await tried(() => post("arena", body)); // returns after both models have answered
    if (!made) return false;
    notice(`${made.items} pairs are ready to be judged`);
    tried(() => refresh(page));
    return true;
  };
  ask(
    { title: "New match", action: "Start the match", send, first },
    field("This run", first),
    field("Against", second),
    field("Prompts", prompts),
    field("Number of prompts, if you write none", many),
  );
}
