// Token microscope: any answer of any kept step, each token coloured by a quantity of training.

import { get } from "../api.js";
import { askList, goTo, loadList, reload, scrub, walk } from "../answer_list.js";
import { follow, look, nearest } from "../answer_view.js";
import { choose, debounced, fill, h, onceAFrame } from "../dom.js";
import { bindPage } from "../keys.js";
import { makeLens } from "../microscope.js";
import { notice, tried } from "../notices.js";
import { emptyState } from "../parts.js";
import { turn } from "../token_colour.js";

const SORTS = [
  ["row", "as sampled"],
  ["score", "highest score"],
  ["kl", "highest KL"],
  ["advantage", "most negative advantage"],
  ["length", "longest"],
];

export async function open(view) {
  const [id, beside, row] = [view.parts[1], view.query.get("beside"), view.query.get("row")];
  const page = {
    view,
    list: [],
    total: 0,
    offset: 0,
    at: -1,
    quantity: localStorage.getItem("quantity") ?? "advantage",
    filters: { sort: "row", q: "", truncated: "" },
  };
  // If the address names an answer, load it and the list in parallel.
  const step = view.query.get("step");
  if (step !== null && row !== null) {
    page.early = get(`runs/${id}/rollouts/${step}/${row}`).catch(() => null);
    page.earlyList = askList(page, id, step).catch(() => null);
  }
  [page.run, page.beside] = await Promise.all([get(`runs/${id}`), beside ? get(`runs/${beside}`) : null]);
  page.step = Number(view.query.get("step") ?? page.run.rollout_steps.at(-1) ?? 0);
  if (!page.run.rollout_steps.length) {
    fill(
      view.root,
      h("div", { class: "head" }, h("h1", {}, h("a", { href: `#/run/${page.run.id}` }, page.run.name))),
      emptyState(
        "This run kept no answers, so there are no tokens to look at.",
        h("a", { class: "button main", href: `#/run/${page.run.id}` }, "Open its curves"),
      ),
    );
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
  fill(
    page.picker,
    [{ id: "", name: "no other run" }, ...others].map((each) =>
      h("option", { value: each.id, selected: String(each.id) === String(page.beside?.id ?? "") }, each.name),
    ),
  );
}

function build(page) {
  const { run, view } = page;
  page.lenses = [makeLens({ title: run.name, followed: (place) => follow(page, 0, place) })];
  if (page.beside) page.lenses.push(makeLens({ title: page.beside.name, followed: (place) => follow(page, 1, place) }));
  page.slider = h("input", {
    type: "range",
    min: 0,
    max: run.rollout_steps.length - 1,
    step: 1,
    "aria-label": "Step",
    value: nearest(run.rollout_steps, page.step),
    oninput: (event) => {
      page.stepWord.textContent = `step ${run.rollout_steps[event.target.value]}`;
      scrubSoon();
    },
  });
  page.stepWord = h("output", {}, `step ${page.step}`);
  page.across = h("div", { class: "across" });
  page.answers = h("ol", { class: "answers" });
  page.found = h("small", { role: "status" });
  page.quantities = h("span", { class: "row", role: "group", "aria-label": "Colour by" });
  page.legend = h("span", { class: "legend", "aria-hidden": "true" });
  const scrubSoon = debounced(60, () => tried(() => scrub(page, run.rollout_steps[page.slider.value])));
  const search = debounced(250, () => tried(() => reload(page)));
  page.search = h("input", {
    type: "search",
    placeholder: "Text in prompt or answer",
    "aria-label": "Text search",
    oninput: (event) => {
      page.filters.q = event.target.value;
      search();
    },
  });
  fill(
    view.root,
    h(
      "div",
      { class: "head" },
      h("h1", {}, h("a", { href: `#/run/${run.id}` }, run.name)),
      h("small", {}, "token microscope"),
      h("span", { class: "grow" }),
      h(
        "label",
        { class: "inline" },
        "Compare with",
        (page.picker = h("select", { onchange: (event) => goTo(page, { beside: event.target.value }) })),
      ),
    ),
    h("div", { class: "row tools-row" }, h("span", {}, "Colour by"), page.quantities, page.legend),
    h(
      "div",
      { class: "microscope" },
      h(
        "aside",
        { class: "panel finder" },
        h(
          "div",
          { class: "row" },
          choose(
            SORTS,
            "row",
            (sort) => {
              page.filters.sort = sort;
              reload(page);
            },
            { "aria-label": "Sort by" },
          ),
          h(
            "label",
            { class: "inline" },
            h("input", {
              type: "checkbox",
              onchange: (event) => {
                page.filters.truncated = event.target.checked ? 1 : "";
                reload(page);
              },
            }),
            "cut off only",
          ),
        ),
        page.search,
        page.found,
        page.answers,
      ),
      h(
        "div",
        { class: "lenses" },
        h(
          "div",
          { class: "scrub row" },
          h("label", { class: "inline grow" }, h("span", {}, "Through training"), page.slider),
          page.stepWord,
        ),
        (page.prompt = h("div", { class: "prompt-line" })),
        h(
          "div",
          { class: page.beside ? "pair" : "single" },
          page.lenses.map((lens) => lens.frame),
        ),
        page.across,
      ),
    ),
  );
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
    { key: "k", does: "Previous answer", run: () => walk(page, -1) },
    { key: ["]", "."], does: "Same prompt, later in training", run: () => nextStep(1) },
    { key: ["[", ","], does: "Same prompt, earlier in training", run: () => nextStep(-1) },
    { key: "q", does: "Colour by the next quantity", run: () => turn(page, 1) },
    { key: "Q", does: "Colour by the previous quantity", run: () => turn(page, -1) },
    {
      key: ["ArrowLeft", "ArrowRight"],
      does: "Move through the tokens",
      run: () => {
        page.lenses[0].text.box.focus();
        page.lenses[0].text.go(firstAnswerToken(page.lenses[0].rollout));
      },
    },
    { key: "x", does: "Next clipped token", run: () => nextClipped(page) },
    { key: "/", does: "Search", run: () => page.search.focus() },
    {
      key: "Escape",
      does: "Back to the run",
      run: (event) => event.target.tagName !== "INPUT" && (location.hash = `#/run/${page.run.id}`),
    },
  ];
}

function firstAnswerToken(rollout) {
  return Math.max(0, rollout?.response.indexOf(true) ?? 0);
}

function nextClipped(page) {
  const [lens] = page.lenses;
  const clipped = (lens.rollout?.columns.clipped ?? []).flatMap((is, place) =>
    is && lens.rollout.response[place] ? [place] : [],
  );
  if (!clipped.length) {
    notice("No token of this answer was clipped.");
    return;
  }
  page.clipAt = clipped.find((place) => place > (page.clipAt ?? -1)) ?? clipped[0];
  lens.text.box.focus();
  lens.text.go(page.clipAt);
}
