// The answers of a step, filtered and sorted, and moving between them.

import { get } from "./api.js";
import { look } from "./answer_view.js";
import { fill, h } from "./dom.js";
import { number, visible } from "./format.js";
import { tried } from "./notices.js";

const A_PAGE = 50;

/** Load the answers of a step that match the filters. */
export function askList(page, run, step) {
  return get(`runs/${run}/rollouts`, { step, ...page.filters, limit: A_PAGE, offset: page.offset });
}

export async function loadList(page) {
  const early = await page.earlyList;
  page.earlyList = null;
  const found = early ?? (await askList(page, page.run.id, page.step));
  if (!page.view.isOpen()) return;
  page.list = page.offset ? [...page.list, ...found.rollouts] : found.rollouts;
  page.total = found.total;
  drawList(page);
}

export async function reload(page) {
  page.offset = 0;
  await loadList(page);
  if (page.list.length) await look(page, page.step, page.list[0].row);
}

function drawList(page) {
  page.found.textContent = `${page.total} of step ${page.step}`;
  fill(
    page.answers,
    page.list.map((each) =>
      h(
        "li",
        {},
        h(
          "button",
          {
            type: "button",
            class: "answer",
            "aria-pressed": each.row === page.at ? "true" : "false",
            "data-row": each.row,
            onclick: () => tried(() => look(page, page.step, each.row)),
          },
          h("span", { class: "answer-text" }, visible(each.completion).replaceAll("\n", "↵") || "(nothing)"),
          h(
            "small",
            {},
            `${number(each.score)} · ${each.length} tok${each.kl === null || each.kl === undefined ? "" : ` · KL ${number(each.kl)}`}`,
            each.clipped ? ` · ${each.clipped} clipped` : "",
            each.finish === "length" ? " · cut off" : "",
          ),
        ),
      ),
    ),
  );
  if (page.list.length < page.total) {
    page.answers.append(
      h(
        "li",
        {},
        h(
          "button",
          {
            type: "button",
            onclick: () => {
              page.offset = page.list.length;
              tried(() => loadList(page));
            },
          },
          "More",
        ),
      ),
    );
  }
}

export function walk(page, by) {
  const place = page.list.findIndex((each) => each.row === page.at) + by;
  const next = page.list[Math.max(0, Math.min(page.list.length - 1, place))];
  if (next) tried(() => look(page, page.step, next.row));
}

export function goTo(page, changes) {
  const words = { step: page.step, row: page.at, beside: page.beside?.id ?? "", ...changes };
  const kept = Object.entries(words).filter(([, value]) => value !== "" && value !== null && value >= 0);
  location.hash = `#/run/${page.run.id}/tokens?${new URLSearchParams(kept)}`;
}

/** The slider: shows the same prompt at this step, or at the nearest step that has it. */
export async function scrub(page, step) {
  const closest = (page.occurrences ?? []).toSorted((a, b) => Math.abs(a.step - step) - Math.abs(b.step - step))[0];
  page.step = closest?.step ?? step;
  if (closest) await look(page, closest.step, closest.row);
  page.offset = 0;
  await loadList(page);
}
