// The curves of a run's page: loading them, drawing them, smoothing them, and zooming in.

import { onceAFrame } from "./dom.js";
import { tried } from "./notices.js";

export async function loadOpen(page) {
  const names = page.charts.filter((chart) => chart.isOpen()).map((chart) => chart.name);
  await Promise.all(page.compared.map((each) => each.load(names, page.range)));
}

export function drawOne(page, chart) {
  if (chart.isOpen())
    chart.show(
      page.compared.map((each) => each.line(chart.name)),
      { weight: page.weight, range: page.range },
    );
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
  drawAll(page); // at once with what is here, then with finer points
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
