// One chart: a metric of one or several runs by step, drawn with uPlot.

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { h, save } from "./dom.js";
import { inWords, smooth } from "./curves.js";
import { number } from "./format.js";
import { ink } from "./theme.js";

const HEIGHT = 170;

/** A chart in a frame. `zoomed(min, max)` is called when a range is selected; `group` shares the cursor. */
export function makeChart({ name, title, note, group, zoomed, across = "step" }) {
  const readout = h("span", { class: "readout" });
  const canvas = h("div", { class: "plot", role: "img" });
  const png = h(
    "button",
    { type: "button", class: "quiet", title: "Save as PNG", onclick: () => savePicture() },
    "PNG",
  );
  const csv = h("button", { type: "button", class: "quiet", title: "Save as CSV", onclick: () => saveTable() }, "CSV");
  const beside = h("div", { class: "beside" });
  const frame = h(
    "figure",
    { class: "chart", "data-metric": name },
    h(
      "figcaption",
      {},
      h("h3", { title: note ? `${name}: ${note}` : name }, title),
      readout,
      h("span", { class: "tools" }, png, csv),
    ),
    canvas,
    note && h("small", { class: "note" }, note),
    beside,
  );

  let plot = null;
  let lines = []; // [{label, colour, steps, values, low, high}]
  let settings = { weight: 0, range: null };

  function draw() {
    const width = Math.max(200, canvas.clientWidth || frame.clientWidth || 380);
    const { data, series, bands } = arrange(lines, settings.weight);
    plot?.destroy();
    plot = new uPlot(options(width, series, bands), data, canvas);
    if (settings.range) plot.setScale("x", { min: settings.range[0], max: settings.range[1] });
    canvas.setAttribute(
      "aria-label",
      lines.map((line) => inWords(`${title} of ${line.label}`, line.steps, line.values, number)).join("; "),
    );
    say(null);
  }

  function options(width, series, bands) {
    const axis = {
      stroke: ink("--soft"),
      grid: { stroke: ink("--grid"), width: 1 },
      ticks: { stroke: ink("--grid"), size: 4 },
      font: `11px ${ink("--sans")}`,
      labelGap: 0,
    };
    return {
      width,
      height: HEIGHT,
      series,
      bands,
      legend: { show: false },
      padding: [8, 10, 0, 0],
      cursor: {
        sync: { key: group, setSeries: false },
        y: false,
        points: { size: 6 },
        drag: { x: true, y: false, setScale: false },
      },
      scales: { x: { time: false }, y: { range: (_, low, high) => padded(low, high) } },
      axes: [
        {
          ...axis,
          size: 24,
          space: 70,
          values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? short(tick) : "")),
        },
        { ...axis, size: 52, space: 32, values: (_, ticks) => ticks.map((tick) => number(tick)) },
      ],
      hooks: {
        setCursor: [(self) => say(self.cursor.idx)],
        setSelect: [
          (self) => {
            if (self.select.width < 4) return;
            zoomed(self.posToVal(self.select.left, "x"), self.posToVal(self.select.left + self.select.width, "x"));
            self.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          },
        ],
      },
    };
  }

  function say(place) {
    readout.replaceChildren();
    for (const [which, line] of lines.entries()) {
      const value = place === null || place === undefined ? latest(line.values) : plot.data[line.at][place];
      readout.append(h("span", { class: `c${which % 6}` }, number(value)));
    }
    if (place !== null && place !== undefined && plot)
      readout.prepend(h("small", {}, `${across} ${plot.data[0][place]}`));
  }

  function savePicture() {
    const source = plot.ctx.canvas;
    const ratio = devicePixelRatio || 1;
    const picture = h("canvas", { width: source.width, height: source.height + Math.round(30 * ratio) });
    const pen = picture.getContext("2d");
    pen.fillStyle = ink("--paper");
    pen.fillRect(0, 0, picture.width, picture.height);
    pen.fillStyle = ink("--ink");
    pen.font = `600 ${13 * ratio}px ${ink("--sans")}`;
    pen.fillText(`${title} (${lines.map((line) => line.label).join(", ")})`, 10 * ratio, 20 * ratio);
    pen.drawImage(source, 0, 30 * ratio);
    picture.toBlob((blob) => save(blob, `${name.replaceAll("/", "-")}.png`), "image/png");
  }

  function saveTable() {
    const rows = lines.flatMap((line) =>
      line.steps.map((step, place) => `${quoted(line.label)},${step},${line.values[place] ?? ""}`),
    );
    save(
      new Blob([["run,step,value", ...rows, ""].join("\n")], { type: "text/csv" }),
      `${name.replaceAll("/", "-")}.csv`,
    );
  }

  return {
    frame,
    beside,
    name,
    title,
    /** Draw these lines with these settings: {weight, range}. */
    show(newLines, newSettings) {
      [lines, settings] = [newLines, { ...settings, ...newSettings }];
      draw();
    },
    resize: () => plot && plot.setSize({ width: canvas.clientWidth, height: HEIGHT }),
    redraw: () => plot && draw(),
    close: () => plot?.destroy(),
  };
}

/** uPlot's columns: steps, then for each run the edges of its band, its raw values if smoothed, its line. */
function arrange(lines, weight) {
  const [series, bands, tables] = [[{}], [], []];
  for (const [which, line] of lines.entries()) {
    const colour = ink(`--c${which % 6}`);
    const columns = [line.steps];
    const put = (values, look) => {
      columns.push(values);
      series.push({ points: { show: false }, spanGaps: true, ...look });
      return series.length - 1;
    };
    if (line.low) {
      const high = put(line.high, { width: 0, stroke: "transparent" });
      const low = put(line.low, { width: 0, stroke: "transparent" });
      bands.push({ series: [high, low], fill: `${colour}33` });
    } else if (weight) {
      put(line.values, { stroke: `${colour}55`, width: 1 });
    }
    const few = line.dots || line.steps.length < 3;
    line.at = put(smooth(line.values, weight), {
      stroke: colour,
      width: 1.6,
      points: { show: few, size: 6, fill: colour },
      spanGaps: false,
    });
    tables.push(columns);
  }
  const data = tables.length ? (tables.length === 1 ? tables[0] : uPlot.join(tables)) : [[]];
  return { data, series, bands };
}

function padded(low, high) {
  if (low === null || low === undefined) return [0, 1];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
  return [low - room, high + room];
}

function short(tick) {
  return Math.abs(tick) >= 1e6 ? `${tick / 1e6}M` : Math.abs(tick) >= 1e4 ? `${tick / 1e3}k` : String(tick);
}

function latest(values) {
  return values.findLast((value) => value !== null && Number.isFinite(value)) ?? null;
}

/** A table cell that no spreadsheet reads as a formula. */
function quoted(text) {
  const safe = /^[=+\-@\t\r\n\uFF1D\uFF0B\uFF0D\uFF20]/.test(text) ? `'${text}` : text;
  return `"${safe.replaceAll('"', '""')}"`;
}
