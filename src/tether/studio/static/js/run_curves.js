// The curves of a run's page: load, draw, smooth and zoom.

import { makeChart } from "./chart.js";
import { questionsFor } from "./curves.js";
import { fill, h, onceAFrame } from "./dom.js";
import { tried } from "./notices.js";

/** The charts of the recorded metrics, grouped by question; they replace the current ones. */
export function buildCurves(page) {
  page.charts.forEach((chart) => chart.close());
  page.charts = [];
  fill(
    page.questions,
    questionsFor(page.run.metric_names).map((group) => questionSection(page, group)),
  );
}

function questionSection(page, { question, charts, closed }) {
  const grid = h("div", { class: "charts" });
  const flat = h("div", { class: "charts" });
  const flatWords = h("summary", {});
  const fold = h("details", { class: "flat", hidden: true }, flatWords, flat);
  const body = h(
    "details",
    { class: "question", open: !closed },
    h("summary", {}, h("h2", {}, question), h("small", {}, charts.length)),
    grid,
    fold,
  );
  fold.addEventListener("toggle", () => fold.open && made.forEach((chart) => drawOne(page, chart)));
  const made = charts.map((each) =>
    makeChart({ ...each, group: "steps", zoomed: (low, high) => zoom(page, [low, high]) }),
  );
  for (const chart of made) {
    chart.isOpen = () => body.open;
    chart.isFolded = () => chart.frame.parentElement === flat && !fold.open;
    chart.place = () => placeChart({ made, chart, grid, flat, fold, flatWords });
    grid.append(chart.frame);
  }
  page.charts.push(...made);
  let wasOpen = !closed; // browsers also fire the event for the initial state, whose curves are already loaded
  body.addEventListener("toggle", async () => {
    if (body.open === wasOpen) return;
    wasOpen = body.open;
    if (!wasOpen) return;
    await loadOpen(page);
    made.forEach((chart) => drawOne(page, chart));
  });
  return body;
}

export async function loadOpen(page) {
  const names = page.charts.filter((chart) => chart.isOpen()).map((chart) => chart.name);
  await Promise.all(page.compared.map((each) => each.load(names, page.range)));
}

export function drawOne(page, chart) {
  if (!chart.isOpen()) return;
  const lines = page.compared.map((each) => each.line(chart.name));
  chart.isZero = lines.every((line) => line.values.every((value) => value === 0 || value === null));
  chart.place();
  if (!chart.isFolded()) chart.show(lines, { weight: page.weight, range: page.range });
}

/** A curve that is zero throughout is collapsed, and shown with its first other value. */
function placeChart({ made, chart, grid, flat, fold, flatWords }) {
  const home = chart.isZero ? flat : grid;
  if (chart.frame.parentElement !== home) {
    const after = made.slice(made.indexOf(chart) + 1).find((each) => each.frame.parentElement === home);
    home.insertBefore(chart.frame, after?.frame ?? null);
  }
  const zero = made.filter((each) => each.frame.parentElement === flat);
  fold.hidden = zero.length === 0;
  const words = `Zero throughout: ${zero.map((each) => each.title).join(", ")}`;
  if (flatWords.textContent !== words) flatWords.textContent = words;
}

export function drawAll(page) {
  page.charts.forEach((chart) => drawOne(page, chart));
}

export function setWeight(page, weight) {
  page.weight = Math.round(weight * 100) / 100;
  page.slider.value = page.weight;
  localStorage.setItem("smoothing", page.weight);
  page.drawSoon ??= onceAFrame(() => drawAll(page));
  page.drawSoon();
}

export async function zoom(page, range) {
  page.range = range && range[1] - range[0] >= 1 ? range : null;
  page.zoomed.hidden = page.range === null;
  drawAll(page); // at once with the loaded points, then with finer ones
  await tried(() => loadOpen(page));
  drawAll(page);
}

export function zoomBy(page, factor, shift) {
  const last = Math.max(1, ...page.compared.map((each) => each.run.step));
  const [low, high] = page.range ?? [0, last];
  const middle = (low + high) / 2 + shift * (high - low);
  const half = Math.max(1, ((high - low) / 2) * factor);
  if (half * 2 >= last) zoom(page, null);
  else zoom(page, [Math.max(0, middle - half), Math.min(last, middle + half)]);
}
