// Run: its curves grouped by question, the doctor's findings, and its events.

import { address, get } from "../api.js";
import { fill, h, onceAFrame } from "../dom.js";
import { clock, number } from "../format.js";
import { hearDoctor } from "../doctor.js";
import { bindPage } from "../keys.js";
import { listen } from "../live.js";
import { diffTable, notesLine } from "../notes.js";
import { notice, tried } from "../notices.js";
import { emptyState, progressBar, stateMark, timeLeft } from "../parts.js";
import { runActions } from "../run_actions.js";
import { buildCurves, drawAll, loadOpen, setWeight, zoom, zoomBy } from "../run_curves.js";
import { RunSeries } from "../series.js";

const DOCTOR_EVERY = 15000; // ms between two checks of a running run

export async function open(view) {
  const id = view.parts[1];
  const others = (view.query.get("with") ?? "").split(",").filter(Boolean);
  const compared = [id, ...others].map((each) => new RunSeries({ id: each, name: "" }));
  // Load the run and all its curves in parallel.
  const [run, ...rest] = await Promise.all([
    get(`runs/${id}`),
    ...others.map((each) => get(`runs/${each}`)),
    ...compared.map((each) => each.load([])),
  ]);
  [run, ...rest.slice(0, others.length)].forEach((each, place) => {
    compared[place].run = each;
  });
  if (!view.isOpen()) return;
  const page = { view, run, compared, charts: [], weight: Number(localStorage.getItem("smoothing") ?? 0), range: null };
  build(page);
  drawAll(page);
  follow(page);
  hearDoctor(page);
  tried(() => fillPicker(page));
  if (compared.length > 1) tried(() => showDiff(page));
}

/** The changed settings, above the curves. */
async function showDiff(page) {
  const found = await get("diff", { runs: page.compared.map((each) => each.run.id).join(",") });
  if (page.view.isOpen()) fill(page.diff, h("h2", {}, "Settings that differ"), diffTable(found));
}

// -- the page ------------------------------------------------------------------------------------------------------

function build(page) {
  const { run, view } = page;
  page.state = h("span", { class: "row" });
  page.latest = h("dl", { class: "latest" });
  page.doctor = h("section", { class: "doctor" });
  page.events = h("ol", { class: "events" });
  page.slider = h("input", {
    type: "range",
    min: 0,
    max: 0.98,
    step: 0.02,
    value: page.weight,
    "aria-label": "Smoothing",
    oninput: (event) => setWeight(page, Number(event.target.value)),
  });
  page.zoomed = h(
    "button",
    { type: "button", onclick: () => zoom(page, null), hidden: true },
    "Whole run",
    h("kbd", {}, "0"),
  );
  page.questions = h("div", { class: "questions" });
  page.diff = h("section", { class: "question" });
  page.nothing = h("div", {});
  page.notes = notesLine(run);
  page.tokens = h("a", { class: "button", href: `#/run/${run.id}/tokens` }, "Answers, token by token", h("kbd", {}, "m"));
  buildCurves(page);
  fill(
    view.root,
    h(
      "div",
      { class: "head" },
      h("h1", {}, run.name),
      h("small", {}, run.method),
      page.state,
      h("span", { class: "grow" }),
      runActions(run),
      page.tokens,
    ),
    page.notes,
    page.latest,
    (page.tools = h(
      "div",
      { class: "row tools-row" },
      h("label", { class: "inline" }, "Smoothing", page.slider),
      page.zoomed,
      overlayPicker(page),
      h("span", { class: "grow" }),
      h(
        "a",
        {
          class: "button",
          href: address(`runs/${run.id}/metrics.csv`),
          download: `${run.name.replaceAll("/", "-")}.csv`,
        },
        "All metrics as CSV",
      ),
    )),
    page.diff,
    page.doctor,
    page.nothing,
    page.questions,
    (page.happened = h("section", { class: "question" }, h("h2", {}, "Events"), page.events)),
    settingsOf("Recipe", run.config),
    settingsOf("Software", run.environment),
  );
  drawHead(page);
  drawEvents(page);
  bindPage(keys(page));
  const observer = new ResizeObserver(onceAFrame(() => page.charts.forEach((chart) => chart.resize())));
  observer.observe(view.root);
  const repaint = () => page.charts.forEach((chart) => chart.redraw());
  addEventListener("themechange", repaint);
  view.onClose(() => {
    observer.disconnect();
    removeEventListener("themechange", repaint);
    page.charts.forEach((chart) => chart.close());
  });
}

function overlayPicker(page) {
  const rest = page.compared.slice(1).map((each) => each.run.id);
  const chips = page.compared.map((each, place) =>
    h(
      "span",
      { class: `chip c${place % 6}` },
      each.run.name,
      place > 0 &&
        h(
          "button",
          {
            type: "button",
            class: "quiet",
            "aria-label": `Remove ${each.run.name}`,
            onclick: () =>
              goWith(
                page,
                rest.filter((id) => id !== each.run.id),
              ),
          },
          "×",
        ),
    ),
  );
  page.picker = h("select", {
    "aria-label": "Overlay another run",
    hidden: true,
    onchange: (event) => goWith(page, [...rest, event.target.value]),
  });
  return h("span", { class: "row" }, chips, page.picker);
}

function goWith(page, ids) {
  location.hash = `#/run/${page.run.id}${ids.length ? `?with=${ids.join(",")}` : ""}`;
}

/** The runs that can be compared with this one; they may be loaded after the curves. */
async function fillPicker(page) {
  const shown = new Set(page.compared.map((each) => each.run.id));
  const others = (await get("runs")).runs.filter((each) => !shown.has(each.id));
  fill(
    page.picker,
    h("option", { value: "" }, "Compare with a run…"),
    others.map((each) => h("option", { value: each.id }, each.name)),
  );
  page.picker.hidden = others.length === 0;
}

function settingsOf(title, values) {
  const text = JSON.stringify(values, null, 2);
  return h(
    "details",
    { class: "question" },
    h("summary", {}, h("h2", {}, title)),
    h("pre", { class: "settings" }, text),
  );
}

function drawHead(page) {
  const { run } = page;
  page.tokens.hidden = run.rollout_steps.length === 0;
  const left = run.state === "running" ? timeLeft(run.seconds_left) : "";
  fill(page.state, stateMark(run.state), progressBar(run.step, run.steps), left && h("small", {}, left));
  const bare = run.metric_names.length === 0;
  for (const each of [page.tools, page.doctor, page.latest]) each.hidden = bare;
  fill(page.nothing, bare && nothingYet(run));
  const names = { score: "Score", "held_out/score": "Held-out", accuracy: "Accuracy", kl_ref_k3: "KL", loss: "Loss" };
  fill(
    page.latest,
    Object.entries(names)
      .filter(([name]) => run.latest[name] !== undefined)
      .map(([name, title]) => h("div", {}, h("dt", {}, title), h("dd", {}, number(run.latest[name])))),
  );
}

function nothingYet(run) {
  if (run.state === "running")
    return emptyState("The first step is running; its metrics will appear here.", runsLink());
  return emptyState(`This run ended (${run.state}) before its first step; the events below say why.`, runsLink());
}

function runsLink() {
  return h("a", { class: "button main", href: "#/runs" }, "Back to the runs");
}

function drawEvents(page) {
  page.happened.hidden = page.run.events.length === 0;
  fill(
    page.events,
    page.run.events
      .slice(-200)
      .reverse()
      .map((each) =>
        h(
          "li",
          {},
          h("time", {}, clock(each.time)),
          h("b", {}, each.kind),
          h("span", {}, each.step === null ? "" : `step ${each.step}`),
          h("span", {}, each.text),
        ),
      ),
  );
}

function keys(page) {
  return [
    {
      key: "m",
      does: "Its answers, token by token",
      run: () => {
        location.hash = `#/run/${page.run.id}/tokens`;
      },
    },
    { key: ["s"], does: "Smoother", run: () => setWeight(page, Math.min(0.98, page.weight + 0.1)) },
    { key: ["S"], does: "Less smooth", run: () => setWeight(page, Math.max(0, page.weight - 0.1)) },
    { key: ["+", "="], does: "Zoom in", run: () => zoomBy(page, 0.5, 0) },
    { key: "-", does: "Zoom out", run: () => zoomBy(page, 2, 0) },
    { key: "[", does: "Move left", run: () => zoomBy(page, 1, -0.5) },
    { key: "]", does: "Move right", run: () => zoomBy(page, 1, 0.5) },
    { key: "0", does: "Whole run", run: () => zoom(page, null) },
    { key: "o", does: "Overlay another run", run: () => page.picker.focus() },
    { key: "e", does: "Edit its note, tags and group", run: () => page.notes.edit() },
  ];
}

/** Add charts for metrics that are new since the page was opened. */
function noteNames(page, names) {
  const fresh = names.filter((name) => !page.run.metric_names.includes(name));
  if (!fresh.length) return;
  page.run.metric_names.push(...fresh);
  buildCurves(page);
  hearDoctor(page);
}

/** Estimate the time left from the pace of the live steps. */
function keepPace(page) {
  const now = Date.now() / 1000;
  const took = now - (page.lastStep ?? now);
  if (took > 0) page.pace = page.pace === undefined ? took : 0.8 * page.pace + 0.2 * took;
  page.lastStep = now;
  if (page.pace !== undefined) page.run.seconds_left = page.pace * (page.run.steps - page.run.step);
}

// -- live ----------------------------------------------------------------------------------------------------------

function follow(page) {
  const redraw = onceAFrame(() => {
    if (!page.view.isOpen()) return;
    drawHead(page);
    drawAll(page);
  });
  const reload = async () => {
    const fresh = await tried(() => get(`runs/${page.run.id}`));
    if (!fresh || !page.view.isOpen()) return;
    const before = page.run.metric_names;
    Object.assign(page.run, fresh, { metric_names: before });
    noteNames(page, fresh.metric_names);
    await tried(() => loadOpen(page));
    drawEvents(page);
    redraw();
  };
  const handlers = {
    again: reload,
    run: (news) => {
      const before = page.run.state;
      if (news.step > page.run.step) reload();
      Object.assign(page.run, news, { latest: { ...page.run.latest, ...news.latest } });
      if (before !== news.state) {
        notice(`${page.run.name}: ${news.state}`);
        reload();
        hearDoctor(page);
      }
      redraw();
    },
    step: (news) => {
      if (news.step > page.run.step) reload(); // steps were recorded between loading and listening
      page.run.step = Math.max(page.run.step, news.step + 1);
      keepPace(page);
      for (const name of Object.keys(page.run.latest))
        page.run.latest[name] = news.metrics[name] ?? page.run.latest[name];
      if (page.compared[0].append(news.step, news.metrics)) reload();
      noteNames(page, Object.keys(news.metrics));
      page.view.root.dataset.step = news.step;
      redraw();
    },
    event: (news) => {
      page.run.events.push(news);
      drawEvents(page);
    },
  };
  page.view.onClose(listen(page.run.id, handlers));
  const timer = setInterval(() => page.run.state === "running" && hearDoctor(page), DOCTOR_EVERY);
  page.view.onClose(() => clearInterval(timer));
}
