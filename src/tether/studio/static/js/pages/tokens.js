// Token microscope: any answer of any kept step, each token coloured by what training made of it.

import { get } from "../api.js";
import { choose, debounced, fill, h, onceAFrame } from "../dom.js";
import { number, visible } from "../format.js";
import { bindPage } from "../keys.js";
import { makeLens, quantitiesOf } from "../microscope.js";
import { notice, tried } from "../notices.js";
import { QUANTITIES, SHADES } from "../palette.js";

const SORTS = [["row", "as sampled"], ["score", "highest score"], ["kl", "highest KL"], ["advantage", "most negative advantage"], ["length", "longest"]];
const A_PAGE = 50;

export async function open(view) {
  const [id, beside, row] = [view.parts[1], view.query.get("beside"), view.query.get("row")];
  const page = {
    view, list: [], total: 0, offset: 0, at: -1, quantity: localStorage.getItem("quantity") ?? "advantage",
    filters: { sort: "row", q: "", truncated: "" },
  };
  // Where the address says which answer, it is asked for at once.
  const step = view.query.get("step");
  if (step !== null && row !== null) page.early = get(`runs/${id}/rollouts/${step}/${row}`).catch(() => null);
  [page.run, page.beside] = await Promise.all([get(`runs/${id}`), beside ? get(`runs/${beside}`) : null]);
  page.step = Number(view.query.get("step") ?? page.run.rollout_steps.at(-1) ?? 0);
  if (!page.run.rollout_steps.length) {
    fill(view.root, h("div", { class: "empty" }, h("h1", {}, page.run.name), "This run kept no answers, so there are no tokens to look at.",
      h("a", { href: `#/run/${page.run.id}` }, "Its curves")));
    return;
  }
  build(page);
  tried(() => fillPicker(page));
  const listed = loadList(page);
  if (row === null) await listed;
  const first = row === null ? page.list[0]?.row : Number(row);
  if (first !== undefined) await look(page, page.step, first);
  await listed;
}

async function fillPicker(page) {
  const others = (await get("runs")).runs.filter((each) => each.id !== page.run.id);
  fill(page.picker, [{ id: "", name: "nothing" }, ...others].map((each) =>
    h("option", { value: each.id, selected: String(each.id) === String(page.beside?.id ?? "") }, each.name)));
}

function build(page) {
  const { run, view } = page;
  page.lenses = [makeLens({ title: run.name, followed: (place) => follow(page, 0, place) })];
  if (page.beside) page.lenses.push(makeLens({ title: page.beside.name, followed: (place) => follow(page, 1, place) }));
  page.slider = h("input", { type: "range", min: 0, max: run.rollout_steps.length - 1, step: 1, "aria-label": "Step",
    value: nearest(run.rollout_steps, page.step),
    oninput: (event) => { page.stepWord.textContent = `step ${run.rollout_steps[event.target.value]}`; scrubSoon(); } });
  page.stepWord = h("output", {}, `step ${page.step}`);
  page.across = h("div", { class: "across" });
  page.answers = h("ol", { class: "answers" });
  page.found = h("small", { role: "status" });
  page.quantities = h("span", { class: "row", role: "group", "aria-label": "Colour by" });
  page.legend = h("span", { class: "legend", "aria-hidden": "true" });
  const scrubSoon = debounced(60, () => tried(() => scrub(page, run.rollout_steps[page.slider.value])));
  const search = debounced(250, () => tried(() => reload(page)));
  page.search = h("input", { type: "search", placeholder: "Text in prompt or answer", "aria-label": "Text search",
    oninput: (event) => { page.filters.q = event.target.value; search(); } });
  fill(view.root,
    h("div", { class: "head" }, h("h1", {}, h("a", { href: `#/run/${run.id}` }, run.name)), h("small", {}, "token microscope"), h("span", { class: "grow" }),
      h("label", { class: "inline" }, "Beside", page.picker = h("select", { onchange: (event) => goTo(page, { beside: event.target.value }) }))),
    h("div", { class: "row tools-row" }, h("span", {}, "Colour by"), page.quantities, page.legend),
    h("div", { class: "microscope" },
      h("aside", { class: "panel finder" },
        h("div", { class: "row" },
          choose(SORTS, "row", (sort) => { page.filters.sort = sort; reload(page); }, { "aria-label": "Sort by" }),
          h("label", { class: "inline" }, h("input", { type: "checkbox", onchange: (event) => { page.filters.truncated = event.target.checked ? 1 : ""; reload(page); } }), "cut off only")),
        page.search, page.found, page.answers),
      h("div", { class: "lenses" },
        h("div", { class: "scrub row" }, h("label", { class: "inline grow" }, h("span", {}, "Through training"), page.slider), page.stepWord),
        page.prompt = h("div", { class: "prompt-line" }),
        h("div", { class: page.beside ? "pair" : "single" }, page.lenses.map((lens) => lens.frame)),
        page.across)));
  bindPage(keys(page));
  const redraw = onceAFrame(() => page.lenses.forEach((lens) => lens.redraw()));
  addEventListener("themechange", redraw);
  addEventListener("resize", redraw);
  view.onClose(() => {
    removeEventListener("themechange", redraw);
    removeEventListener("resize", redraw);
  });
}

function keys(page) {
  const nextStep = (by) => {
    const place = Math.max(0, Math.min(page.run.rollout_steps.length - 1, Number(page.slider.value) + by));
    page.slider.value = place;
    tried(() => scrub(page, page.run.rollout_steps[place]));
  };
  return [
    { key: "j", does: "Next answer", run: () => walk(page, 1) },
    { key: "k", does: "Answer before", run: () => walk(page, -1) },
    { key: ["]", "."], does: "Same prompt, later in training", run: () => nextStep(1) },
    { key: ["[", ","], does: "Same prompt, earlier in training", run: () => nextStep(-1) },
    { key: "q", does: "Colour by the next quantity", run: () => turn(page, 1) },
    { key: "Q", does: "Colour by the quantity before", run: () => turn(page, -1) },
    { key: ["ArrowLeft", "ArrowRight"], does: "Walk through the tokens", run: () => { page.lenses[0].text.box.focus(); page.lenses[0].text.go(firstAnswerToken(page.lenses[0].rollout)); } },
    { key: "x", does: "Next clipped token", run: () => nextClipped(page) },
    { key: "/", does: "Search", run: () => page.search.focus() },
    { key: "Escape", does: "Back to the run", run: (event) => event.target.tagName !== "INPUT" && (location.hash = `#/run/${page.run.id}`) },
  ];
}

function firstAnswerToken(rollout) {
  return Math.max(0, rollout?.response.indexOf(true) ?? 0);
}

function nextClipped(page) {
  const [lens] = page.lenses;
  const clipped = (lens.rollout?.columns.clipped ?? []).flatMap((is, place) => (is && lens.rollout.response[place] ? [place] : []));
  if (!clipped.length) {
    notice("No token of this answer was clipped.");
    return;
  }
  page.clipAt = clipped.find((place) => place > (page.clipAt ?? -1)) ?? clipped[0];
  lens.text.box.focus();
  lens.text.go(page.clipAt);
}

// -- which answer --------------------------------------------------------------------------------------------------

async function loadList(page) {
  const query = { step: page.step, ...page.filters, limit: A_PAGE, offset: page.offset };
  const found = await get(`runs/${page.run.id}/rollouts`, query);
  if (!page.view.isOpen()) return;
  page.list = page.offset ? [...page.list, ...found.rollouts] : found.rollouts;
  page.total = found.total;
  drawList(page);
}

async function reload(page) {
  page.offset = 0;
  await loadList(page);
  if (page.list.length) await look(page, page.step, page.list[0].row);
}

function drawList(page) {
  page.found.textContent = `${page.total} of step ${page.step}`;
  fill(page.answers, page.list.map((each) => h("li", {}, h("button", {
    type: "button", class: "answer", "aria-pressed": each.row === page.at ? "true" : "false", "data-row": each.row,
    onclick: () => tried(() => look(page, page.step, each.row)) },
  h("span", { class: "answer-text" }, visible(each.completion).replaceAll("\n", "↵") || "(nothing)"),
  h("small", {}, `${number(each.score)} · ${each.length} tok${each.kl === null || each.kl === undefined ? "" : ` · KL ${number(each.kl)}`}`,
    each.clipped ? ` · ${each.clipped} clipped` : "", each.finish === "length" ? " · cut off" : "")))));
  if (page.list.length < page.total) {
    page.answers.append(h("li", {}, h("button", { type: "button", onclick: () => { page.offset = page.list.length; tried(() => loadList(page)); } }, "More")));
  }
}

function walk(page, by) {
  const place = page.list.findIndex((each) => each.row === page.at) + by;
  const next = page.list[Math.max(0, Math.min(page.list.length - 1, place))];
  if (next) tried(() => look(page, page.step, next.row));
}

function goTo(page, changes) {
  const words = { step: page.step, row: page.at, beside: page.beside?.id ?? "", ...changes };
  const kept = Object.entries(words).filter(([, value]) => value !== "" && value !== null && value >= 0);
  location.hash = `#/run/${page.run.id}/tokens?${new URLSearchParams(kept)}`;
}

// -- one answer ----------------------------------------------------------------------------------------------------

async function look(page, step, row) {
  page.looking?.abort();
  page.looking = new AbortController();
  const early = await page.early;
  page.early = null;
  const rollout = early ?? (await get(`runs/${page.run.id}/rollouts/${step}/${row}`, {}, { signal: page.looking.signal }));
  if (!page.view.isOpen()) return;
  show(page, rollout);
  await Promise.all([showAcross(page, rollout), showBeside(page, rollout)]);
}

function show(page, rollout) {
  page.at = rollout.row;
  page.clipAt = -1;
  for (const item of page.answers.querySelectorAll("[data-row]")) {
    item.setAttribute("aria-pressed", item.dataset.row === String(rollout.row) && rollout.step === page.step ? "true" : "false");
  }
  page.answers.querySelector('[aria-pressed="true"]')?.scrollIntoView({ block: "nearest" });
  page.slider.value = nearest(page.run.rollout_steps, rollout.step);
  page.stepWord.textContent = `step ${rollout.step}`;
  fill(page.prompt, h("b", {}, "Prompt "), h("small", {}, rollout.prompt_id));
  const has = quantitiesOf(rollout);
  if (!has.includes(page.quantity)) page.quantity = has[0] ?? "advantage";
  drawQuantities(page, has);
  page.lenses[0].setQuantity(page.quantity);
  page.lenses[0].show(rollout);
  page.view.root.dataset.shown = `${rollout.step}/${rollout.row}`;
}

/** Where a run answered a prompt. */
async function occurrences(run, promptId) {
  try {
    return (await get(`runs/${run.id}/prompts/${encodeURIComponent(promptId)}`)).steps;
  } catch (error) {
    if (error.status === 404) return [];
    throw error;
  }
}

/** The steps at which the same prompt was answered: a row of scores that the slider runs along. */
async function showAcross(page, rollout) {
  if (page.promptId !== rollout.prompt_id) {
    page.promptId = rollout.prompt_id;
    page.occurrences = await occurrences(page.run, rollout.prompt_id);
  }
  fill(page.across, page.occurrences.length > 0 && h("h3", {}, "The same prompt through training"), h("ol", {}, page.occurrences.slice(-200).map((each) => h("li", {}, h("button", {
    type: "button", class: "answer", "aria-pressed": each.step === rollout.step && each.row === rollout.row ? "true" : "false",
    onclick: () => tried(() => look(page, each.step, each.row)) },
  h("small", {}, `step ${each.step}`), h("b", {}, number(each.score)), h("span", { class: "answer-text" }, visible(each.completion).replaceAll("\n", "↵")))))));
}

async function showBeside(page, rollout) {
  if (!page.beside) return;
  const steps = await occurrences(page.beside, rollout.prompt_id);
  const closest = steps.toSorted((a, b) => Math.abs(a.step - rollout.step) - Math.abs(b.step - rollout.step))[0];
  const found = closest && (await get(`runs/${page.beside.id}/rollouts/${closest.step}/${closest.row}`));
  if (!page.view.isOpen()) return;
  page.lenses[1].setQuantity(page.quantity);
  page.lenses[1].show(found ?? null, "never answered this prompt");
}

/** The slider: the same prompt at this step, or at the nearest step that has it. */
async function scrub(page, step) {
  const closest = (page.occurrences ?? []).toSorted((a, b) => Math.abs(a.step - step) - Math.abs(b.step - step))[0];
  page.step = closest?.step ?? step;
  if (closest) await look(page, closest.step, closest.row);
  page.offset = 0;
  await loadList(page);
}

function follow(page, which, place) {
  page.view.root.dataset.token = `${which}:${place}`;
}

// -- colour --------------------------------------------------------------------------------------------------------

function drawQuantities(page, has) {
  page.has = has;
  fill(page.quantities, has.map((name) => h("button", { type: "button", "aria-pressed": name === page.quantity ? "true" : "false",
    onclick: () => setQuantity(page, name) }, QUANTITIES[name].title)));
  const [low, high] = QUANTITIES[page.quantity].says;
  const swatches = (sign, order) => order.map((step) => h("i", { class: `t ${sign}${step}` }));
  const steps = Array.from({ length: SHADES }, (_, place) => place + 1);
  fill(page.legend, low && [low, h("span", { class: "ramp" }, swatches("n", steps.toReversed()))],
    h("span", { class: "ramp" }, swatches("p", steps)), high, h("span", { class: "t clipped" }, "clipped"));
}

function setQuantity(page, name) {
  page.quantity = name;
  localStorage.setItem("quantity", name);
  drawQuantities(page, page.has);
  page.lenses.forEach((lens) => lens.setQuantity(name));
}

function turn(page, by) {
  if (!page.has?.length) return;
  const place = (page.has.indexOf(page.quantity) + by + page.has.length) % page.has.length;
  setQuantity(page, page.has[place]);
}

function nearest(steps, step) {
  return steps.reduce((best, each, place) => (Math.abs(each - step) < Math.abs(steps[best] - step) ? place : best), 0);
}
