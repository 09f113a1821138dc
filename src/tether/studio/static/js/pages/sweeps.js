// Sweeps: every sweep of the workspace, the most recently written first.

import { get } from "../api.js";
import { fill, h } from "../dom.js";
import { age } from "../format.js";
import { bindPage } from "../keys.js";
import { emptyState, progressBar } from "../parts.js";
import { valueWithInterval } from "../sweep_parts.js";

export async function open(view) {
  const page = { view, at: 0, sweeps: (await get("sweeps")).sweeps };
  page.table = h("tbody", {});
  fill(
    view.root,
    h("div", { class: "head" }, h("h1", { class: "grow" }, "Sweeps")),
    page.sweeps.length ? list(page) : nothingYet(view),
  );
  bindPage([
    { key: ["j", "ArrowDown"], does: "Next sweep", run: () => move(page, 1) },
    { key: ["k", "ArrowUp"], does: "Previous sweep", run: () => move(page, -1) },
    { key: "Enter", does: "Open the sweep", run: () => openChosen(page) },
  ]);
  draw(page);
}

function nothingYet(view) {
  return emptyState(
    "A sweep runs one recipe with several settings and seeds, and compares them. There is none yet.",
    h("a", { class: "button main", href: "#/runs" }, "Open the runs"),
    h("small", {}, "In a terminal: ", h("code", {}, `tether sweep recipes/sensitivity.yaml --run.directory ${view.me.workspace}`)),
  );
}

function list(page) {
  const names = [["Sweep"], ["Varied"], ["Trials"], ["Best setting"], ["Value", "figure"], ["Updated", "figure"]];
  const head = names.map(([name, kind = ""]) => h("th", { scope: "col", class: kind }, name));
  return h("div", { class: "wide" }, h("table", { class: "sweeps" }, h("thead", {}, h("tr", {}, head)), page.table));
}

function move(page, by) {
  page.at = Math.max(0, Math.min(page.sweeps.length - 1, page.at + by));
  draw(page);
  page.table.querySelector("tr.at")?.scrollIntoView({ block: "nearest" });
}

function openChosen(page) {
  const chosen = page.sweeps[page.at];
  if (chosen && !chosen.error) location.hash = address(chosen);
}

function address(sweep) {
  return `#/sweep/${encodeURIComponent(sweep.name)}`;
}

function draw(page) {
  fill(
    page.table,
    page.sweeps.map((sweep, place) => row(sweep, place === page.at)),
  );
}

function row(sweep, chosen) {
  const look = { class: chosen ? "at" : "", "aria-selected": chosen ? "true" : "false" };
  if (sweep.error) return h("tr", look, h("td", {}, sweep.name), h("td", { colspan: 5 }, sweep.error));
  return h(
    "tr",
    look,
    h("td", { class: "name" }, h("a", { href: address(sweep) }, sweep.name), " ", h("small", {}, `${sweep.method}, ${sweep.sampler}`)),
    h("td", {}, sweep.keys.join(", ")),
    h("td", {}, progressBar(sweep.ended, sweep.trials)),
    h("td", {}, sweep.best ? sweep.best.words : "–"),
    h("td", { class: "figure" }, valueWithInterval(sweep.best?.interval)),
    h("td", { class: "figure" }, age(sweep.written)),
  );
}
