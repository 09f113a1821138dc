// Runs: every run of the workspace, the one written last first.

import { get } from "../api.js";
import { button, fill, h, onceAFrame } from "../dom.js";
import { age, number } from "../format.js";
import { jobsPanel } from "../jobs.js";
import { bindPage } from "../keys.js";
import { lineagePicture } from "../lineage.js";
import { listen } from "../live.js";
import { progressBar, stateMark } from "../parts.js";
import { sparkline } from "../sparkline.js";

export async function open(view) {
  const page = { view, runs: (await get("runs")).runs, at: 0, compared: new Set(), words: "" };
  build(page);
  const redraw = onceAFrame(() => view.isOpen() && draw(page));
  const again = async () => {
    page.runs = (await get("runs")).runs;
    redraw();
  };
  const timer = setInterval(redraw, 10000); // ages grow
  view.onClose(() => clearInterval(timer));
  view.onClose(listen(null, { again, run: (news) => takeNews(page, news, again, redraw) }));
}

function takeNews(page, news, again, redraw) {
  const known = page.runs.find((run) => run.id === news.id);
  if (!known) {
    again(); // a run that was not there when the page was opened
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
  page.table = h("tbody", {});
  page.picture = h("section", { class: "lineage-panel" });
  page.empty = h("div", {});
  const names = [
    ["Compare", "tick"],
    ["Run"],
    ["State"],
    ["Progress"],
    ["Score or loss", "", 2],
    ["KL", "figure"],
    ["Last written", "figure"],
    ["Came from"],
  ];
  fill(
    page.view.root,
    h(
      "div",
      { class: "head" },
      h("h1", {}, "Runs"),
      h("small", { class: "grow" }, page.view.me.workspace),
      page.search,
      page.compare,
      h("a", { class: "button main", href: "#/start" }, "New run", h("kbd", {}, "n")),
    ),
    h(
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
    ),
    page.empty,
    page.picture,
    jobsPanel(page.view),
  );
  bindPage([
    { key: ["j", "ArrowDown"], does: "Next run", run: () => move(page, 1) },
    { key: ["k", "ArrowUp"], does: "Run before", run: () => move(page, -1) },
    { key: "Enter", does: "Open the run", run: () => shown(page)[page.at] && go(`#/run/${shown(page)[page.at].id}`) },
    {
      key: "m",
      does: "Its answers, token by token",
      run: () => shown(page)[page.at] && go(`#/run/${shown(page)[page.at].id}/tokens`),
    },
    { key: "x", does: "Mark the run for comparing", run: () => mark(page, shown(page)[page.at]) },
    { key: "c", does: "Compare the marked runs", run: () => compare(page) },
    { key: "n", does: "New run", run: () => go("#/start") },
    { key: "/", does: "Find a run", run: () => page.search.focus() },
  ]);
  draw(page);
}

function go(address) {
  location.hash = address;
}

function shown(page) {
  return page.runs.filter((run) => `${run.name} ${run.method} ${run.state}`.toLowerCase().includes(page.words));
}

function move(page, by) {
  page.at = Math.max(0, Math.min(shown(page).length - 1, page.at + by));
  draw(page);
  page.table.children[page.at]?.scrollIntoView({ block: "nearest" });
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
  fill(
    page.table,
    list.map((run, place) => row(page, run, place)),
  );
  fill(
    page.empty,
    list.length === 0 &&
      h(
        "div",
        { class: "empty" },
        page.runs.length
          ? "No run is called that."
          : [
              "No runs yet. ",
              h("a", { href: "#/start" }, "Start one"),
              ", or train one with ",
              h("code", {}, `tether train ppo RECIPE --run.directory ${page.view.me.workspace}`),
              ".",
            ],
      ),
  );
  page.compare.disabled = page.compared.size < 1;
  const chosen = list[page.at];
  if (!chosen) {
    fill(page.picture);
  } else {
    fill(
      page.picture,
      h("h2", {}, "What ", h("span", { class: "mono" }, chosen.name), " was made from"),
      h("div", { class: "wide" }, lineagePicture(page.runs, chosen)),
    );
  }
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
        if (event.target.closest("a, input")) return;
        page.at = place;
        draw(page);
      },
    },
    h("td", { class: "tick" }, box),
    h("td", { class: "name" }, h("a", { href: `#/run/${run.id}` }, run.name), " ", h("small", {}, run.method)),
    h("td", {}, stateMark(run.state)),
    h("td", {}, progressBar(run.step, run.steps)),
    h("td", { class: "curve" }, sparkline(run.spark ?? [], { width: 150, label: `${run.name}: how it went` })),
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
