// One sweep: its settings with the best first, the effect of each key, and the curves of chosen settings.

import { get } from "../api.js";
import { makeChart } from "../chart.js";
import { fill, h } from "../dom.js";
import { percent } from "../format.js";
import { bindPage } from "../keys.js";
import { tried } from "../notices.js";
import { emptyState, progressBar } from "../parts.js";
import { differing, effectPanel, rangeOf, valueWithInterval } from "../sweep_parts.js";

const EVERY = 5000; // ms between two looks at a sweep that goes on
const DRAWN_AT_FIRST = 3;

export async function open(view) {
  const name = view.parts[1];
  const page = { view, name, at: 0, drawn: null };
  page.sweep = await get(`sweeps/${encodeURIComponent(name)}`);
  if (!view.isOpen()) return;
  build(page);
  draw(page);
  const timer = setInterval(() => page.sweep.ended < page.sweep.trials && tried(() => refresh(page)), EVERY);
  view.onClose(() => {
    clearInterval(timer);
    page.chart.close();
  });
}

async function refresh(page) {
  page.sweep = await get(`sweeps/${encodeURIComponent(page.name)}`);
  if (page.view.isOpen()) draw(page);
}

function build(page) {
  page.facts = h("p", { class: "row" });
  page.effects = h("div", { class: "effects" });
  page.table = h("tbody", {});
  page.head = h("tr", {});
  page.none = h("div", {});
  page.chart = makeChart({
    name: page.sweep.metric,
    title: page.sweep.metric,
    note: "mean over seeds, with its 95 % interval",
    group: "sweep",
    zoomed: () => {},
  });
  page.curves = h("section", { class: "stack" }, h("h2", {}, "Curves of the ticked settings"), page.chart.frame);
  page.whole = h("div", { class: "wide" }, h("table", { class: "sweeps" }, h("thead", {}, page.head), page.table));
  fill(
    page.view.root,
    h("div", { class: "head" }, h("h1", { class: "grow" }, page.name), h("a", { href: "#/sweeps" }, "All sweeps")),
    page.facts,
    page.none,
    page.curves,
    page.effects,
    h("h2", {}, "Settings"),
    page.whole,
  );
  bindPage([
    { key: ["j", "ArrowDown"], does: "Next setting", run: () => move(page, 1) },
    { key: ["k", "ArrowUp"], does: "Previous setting", run: () => move(page, -1) },
    { key: "x", does: "Draw the setting's curve, or not", run: () => tick(page, page.sweep.settings[page.at]) },
    { key: "Enter", does: "Open its first run", run: () => openRun(page.sweep.settings[page.at]) },
  ]);
}

function move(page, by) {
  page.at = Math.max(0, Math.min(page.sweep.settings.length - 1, page.at + by));
  draw(page);
  page.table.querySelector("tr.at")?.scrollIntoView({ block: "nearest" });
}

function openRun(setting) {
  const first = setting?.runs.find((each) => each.run !== null);
  if (first) location.hash = `#/run/${first.run}`;
}

function tick(page, setting) {
  if (!setting) return;
  if (!page.drawn.delete(setting.setting)) page.drawn.add(setting.setting);
  draw(page);
}

function draw(page) {
  const { sweep } = page;
  page.drawn ??= new Set(sweep.curves.filter((each) => each.steps.length).slice(0, DRAWN_AT_FIRST).map((each) => each.setting));
  const done = sweep.ended > 0;
  fill(
    page.facts,
    progressBar(sweep.ended, sweep.trials),
    h("small", {}, `${sweep.sampler}; ${sweep.seeds.length} seeds; ${sweep.metric}, ${sweep.direction}`),
    sweep.ended < sweep.trials && h("small", {}, "In a terminal: ", h("code", {}, `tether sweep --resume ${sweep.name}`)),
  );
  fill(page.none, !done && emptyState("No trial of this sweep has ended yet."));
  const range = rangeOf(sweep.effects);
  const judged = sweep.effects.filter((effect) => effect.values.some((each) => each.interval));
  fill(page.effects, judged.map((effect) => effectPanel(effect, range)));
  page.curves.hidden = !sweep.curves.some((each) => each.steps.length);
  drawCurves(page);
  const names = [["Curve", "tick"], ["Setting"], ["Value"], ["Behind the best"], ["Chance of best", "figure"], ["Runs by seed"]];
  fill(page.head, names.map(([name, kind = ""]) => h("th", { scope: "col", class: kind }, name)));
  fill(page.table, sweep.settings.map((setting, place) => row(page, setting, place)));
}

function drawCurves(page) {
  const chosen = page.sweep.curves.filter((each) => page.drawn.has(each.setting) && each.steps.length);
  const lines = chosen.map((each) => {
    const setting = page.sweep.settings.find((one) => one.setting === each.setting);
    const banded = each.low.every((value) => value !== null) ? { low: each.low, high: each.high } : {};
    return { label: differing(setting.values, page.sweep.own), steps: each.steps, values: each.mean, ...banded };
  });
  page.chart.show(lines, {});
  fill(
    page.chart.beside,
    lines.map((line, place) => h("small", { class: `c${place % 6}` }, `● ${line.label}`)),
  );
}

function row(page, setting, place) {
  const words = differing(setting.values, page.sweep.own);
  const has = page.sweep.curves.some((each) => each.setting === setting.setting && each.steps.length);
  const box = h("input", { type: "checkbox", "aria-label": `Curve of ${words}`, disabled: !has, onclick: () => tick(page, setting) });
  box.checked = page.drawn.has(setting.setting);
  return h(
    "tr",
    { class: place === page.at ? "at" : "", "aria-selected": place === page.at ? "true" : "false" },
    h("td", { class: "tick" }, box),
    h("td", { class: "name" }, words),
    h("td", {}, valueWithInterval(setting.interval), " ", h("small", {}, setting.rests_on)),
    h("td", {}, valueWithInterval(setting.behind)),
    h("td", { class: "figure" }, percent(setting.chance)),
    h("td", { class: "trials" }, setting.runs.map(runLink)),
  );
}

function runLink(each) {
  const words = each.state === "done" ? `${each.seed}` : `${each.seed} ${each.state}`;
  return each.run === null ? h("small", {}, words) : h("a", { href: `#/run/${each.run}` }, words);
}
