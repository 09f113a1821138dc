// Runs: every run of the workspace, the most recently written first.

import { get } from "../api.js";
import { button, choose, fill, h, onceAFrame } from "../dom.js";
import { age, number } from "../format.js";
import { jobsPanel } from "../jobs.js";
import { bindPage } from "../keys.js";
import { lineagePicture } from "../lineage.js";
import { listen } from "../live.js";
import { askNotes } from "../notes.js";
import { emptyState, progressBar, stateMark, tagChips } from "../parts.js";
import { sparkline } from "../sparkline.js";

const GROUPINGS = [
  ["", "No grouping"],
  ["group", "By group"],
  ["method", "By method"],
  ["state", "By state"],
];

export async function open(view) {
  const page = {
    view,
    runs: (await get("runs")).runs,
    at: 0,
    compared: new Set(),
    words: "",
    tag: view.query.get("tag") ?? "",
    group: view.query.get("group") ?? "",
    by: localStorage.getItem("group-runs-by") ?? "group",
  };
  build(page);
  const redraw = onceAFrame(() => view.isOpen() && draw(page));
  const again = async () => {
    page.runs = (await get("runs")).runs;
    redraw();
  };
  const timer = setInterval(redraw, 10000); // to update the ages
  view.onClose(() => clearInterval(timer));
  view.onClose(listen(null, { again, run: (news) => takeNews(page, news, again, redraw) }));
}

function takeNews(page, news, again, redraw) {
  const known = page.runs.find((run) => run.id === news.id);
  if (!known) {
    again(); // a run that is new since the page was opened
    return;
  }
  const latest = { ...known.latest, ...news.latest };
  if (news.step > known.step) {
    known.updated = Date.now() / 1000;
    known.spark = [...(known.spark ?? []).slice(-39), latest.score ?? latest.loss ?? null];
  }
  Object.assign(known, news, { latest });
  redraw();
}

function build(page) {
  page.search = h("input", {
    type: "search",
    placeholder: "Find a run",
    "aria-label": "Find a run",
    oninput: (event) => {
      page.words = event.target.value.toLowerCase();
      page.at = 0;
      draw(page);
    },
  });
  page.compare = button("Compare", () => compare(page), { key: "c" });
  page.filters = h("div", { class: "row filters" });
  page.table = h("tbody", {});
  page.picture = h("section", { class: "lineage-panel" });
  page.empty = h("div", {});
  page.grouping = choose(
    GROUPINGS,
    page.by,
    (by) => {
      page.by = by;
      localStorage.setItem("group-runs-by", by);
      draw(page);
    },
    { "aria-label": "Group the runs" },
  );
  const names = [
    ["Compare", "tick"],
    ["Run"],
    ["State"],
    ["Progress"],
    ["Score or loss", "", 2],
    ["KL", "figure"],
    ["Updated", "figure"],
    ["Made from"],
  ];
  fill(
    page.view.root,
    h(
      "div",
      { class: "head" },
      h("h1", {}, "Runs"),
      h("small", { class: "grow" }, page.view.me.workspace),
      page.search,
      page.grouping,
      page.compare,
      (page.start = h("a", { class: "button main", href: "#/start" }, "New run", h("kbd", {}, "n"))),
    ),
    page.filters,
    (page.whole = h(
      "div",
      { class: "wide" },
      h(
        "table",
        { class: "runs" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            names.map(([name, kind = "", span = 1]) => h("th", { scope: "col", class: kind, colspan: span }, name)),
          ),
        ),
        page.table,
      ),
    )),
    page.empty,
    page.picture,
    jobsPanel(page.view),
  );
  bindPage([
    { key: ["j", "ArrowDown"], does: "Next run", run: () => move(page, 1) },
    { key: ["k", "ArrowUp"], does: "Previous run", run: () => move(page, -1) },
    { key: "Enter", does: "Open the run", run: () => shown(page)[page.at] && go(`#/run/${shown(page)[page.at].id}`) },
    {
      key: "m",
      does: "Its answers, token by token",
      run: () => shown(page)[page.at] && go(`#/run/${shown(page)[page.at].id}/tokens`),
    },
    { key: "x", does: "Mark the run for comparing", run: () => mark(page, shown(page)[page.at]) },
    { key: "c", does: "Compare the marked runs", run: () => compare(page) },
    { key: "n", does: "New run", run: () => go("#/start") },
    {
      key: "e",
      does: "Edit the run's note, tags and group",
      run: () => shown(page)[page.at] && askNotes(shown(page)[page.at], groupsOf(page), () => draw(page)),
    },
    { key: "/", does: "Find a run", run: () => page.search.focus() },
  ]);
  draw(page);
}

function go(address) {
  location.hash = address;
}

/** The runs that match the filters, sorted by group. */
function shown(page) {
  const fitting = page.runs.filter(
    (run) =>
      `${run.name} ${run.method} ${run.state} ${run.note} ${run.group} ${run.tags.join(" ")}`
        .toLowerCase()
        .includes(page.words) &&
      (!page.tag || run.tags.includes(page.tag)) &&
      (!page.group || run.group === page.group),
  );
  if (!isGrouped(page)) return fitting;
  const places = new Map();
  for (const run of fitting) if (!places.has(run[page.by])) places.set(run[page.by], places.size);
  if (places.has("")) places.set("", Infinity); // runs without a group come last
  return fitting.toSorted((a, b) => places.get(a[page.by]) - places.get(b[page.by]) || 0);
}

function isGrouped(page) {
  return page.by !== "" && (page.by !== "group" || page.runs.some((run) => run.group));
}

function groupsOf(page) {
  return [...new Set(page.runs.map((run) => run.group).filter(Boolean))].sort();
}

/** Show only the runs with a tag or of a group; a second click shows all. */
function filterBy(page, kind, value) {
  page[kind] = page[kind] === value ? "" : value;
  page.at = 0;
  draw(page);
}

function drawFilters(page) {
  const tags = [...new Set(page.runs.flatMap((run) => run.tags))].sort();
  const chip = (kind, value, look) =>
    h(
      "button",
      {
        type: "button",
        class: look,
        "aria-pressed": page[kind] === value ? "true" : "false",
        onclick: () => filterBy(page, kind, value),
      },
      value,
    );
  const groups = groupsOf(page);
  page.filters.hidden = tags.length + groups.length === 0;
  fill(
    page.filters,
    groups.length > 0 && h("small", {}, "Group"),
    groups.map((name) => chip("group", name, "tag group")),
    tags.length > 0 && h("small", {}, "Tag"),
    tags.map((tag) => chip("tag", tag, "tag")),
  );
}

function move(page, by) {
  page.at = Math.max(0, Math.min(shown(page).length - 1, page.at + by));
  draw(page);
  page.table.querySelector("tr.at")?.scrollIntoView({ block: "nearest" });
}

function mark(page, run) {
  if (!run) return;
  if (!page.compared.delete(run.id)) page.compared.add(run.id);
  draw(page);
}

function compare(page) {
  const [first, ...others] = page.compared;
  if (first !== undefined) go(`#/run/${first}${others.length ? `?with=${others.join(",")}` : ""}`);
}

function draw(page) {
  const list = shown(page);
  page.at = Math.min(page.at, Math.max(0, list.length - 1));
  drawFilters(page);
  fill(page.table, rows(page, list));
  const none = page.runs.length === 0;
  for (const each of [page.search, page.compare, page.grouping, page.start]) each.hidden = none;
  page.whole.hidden = list.length === 0;
  fill(page.empty, list.length === 0 && nothingToShow(page, none));
  page.compare.disabled = page.compared.size < 1;
  const chosen = list[page.at];
  if (!chosen) {
    fill(page.picture);
  } else {
    fill(
      page.picture,
      h("h2", {}, "Where ", chosen.name, " comes from"),
      h("div", { class: "wide" }, lineagePicture(page.runs, chosen)),
    );
  }
}

function nothingToShow(page, none) {
  if (none)
    return emptyState(
      "This workspace has no runs yet.",
      h("a", { class: "button main", href: "#/start" }, "Start a run", h("kbd", {}, "n")),
      h("small", {}, "Or in a terminal: ", h("code", {}, `tether train ppo RECIPE --run.directory ${page.view.me.workspace}`)),
    );
  const clear = () => {
    Object.assign(page, { words: "", tag: "", group: "" });
    page.search.value = "";
    draw(page);
  };
  return emptyState("No run matches your search.", button("Show all runs", clear, { kind: "main" }));
}

/** The rows of the runs, under the names of their groups. */
function rows(page, list) {
  const grouped = isGrouped(page);
  return list.flatMap((run, place) => {
    const name = run[page.by];
    const begins = grouped && (place === 0 || list[place - 1][page.by] !== name);
    const many = begins && list.filter((each) => each[page.by] === name).length;
    const head =
      begins &&
      h(
        "tr",
        { class: "group-head" },
        h("th", { scope: "rowgroup", colspan: 9 }, name || "No group", " ", h("small", {}, many)),
      );
    return head ? [head, row(page, run, place)] : [row(page, run, place)];
  });
}

function row(page, run, place) {
  const main = run.latest.score ?? run.latest.loss ?? null;
  const box = h("input", { type: "checkbox", "aria-label": `Compare ${run.name}`, onclick: () => mark(page, run) });
  box.checked = page.compared.has(run.id);
  const from = (run.lineage ?? []).map((each) => each.run ?? each.source.split("/").at(-1));
  return h(
    "tr",
    {
      class: place === page.at ? "at" : "",
      "aria-selected": place === page.at ? "true" : "false",
      onclick: (event) => {
        if (event.target.closest("a, input, button")) return;
        page.at = place;
        draw(page);
      },
    },
    h("td", { class: "tick" }, box),
    h(
      "td",
      { class: "name" },
      h("a", { href: `#/run/${run.id}` }, run.name),
      " ",
      h("small", {}, run.method),
      run.tags.length > 0 &&
        h(
          "span",
          { class: "tags" },
          tagChips(run.tags, (tag) => filterBy(page, "tag", tag)),
        ),
      run.note && h("span", { class: "note", title: run.note }, run.note),
    ),
    h("td", {}, stateMark(run.state)),
    h("td", {}, progressBar(run.step, run.steps)),
    h("td", { class: "curve" }, sparkline(run.spark ?? [], { width: 150, label: `${run.name}: score or loss by step` })),
    h(
      "td",
      { class: "figure" },
      number(main),
      run.latest.score === undefined && main !== null && h("small", {}, " loss"),
    ),
    h("td", { class: "figure", "data-name": "KL " }, number(run.latest.kl_ref_k3)),
    h("td", { class: "figure" }, age(run.updated)),
    h("td", { class: "from" }, [...new Set(from)].join(", ")),
  );
}
