// One answer in the microscope, the same prompt at other steps, and the same prompt in another run.

import { get } from "./api.js";
import { fill, h } from "./dom.js";
import { number, visible } from "./format.js";
import { quantitiesOf } from "./microscope.js";
import { tried } from "./notices.js";
import { drawQuantities } from "./token_colour.js";

export async function look(page, step, row) {
  page.looking?.abort();
  page.looking = new AbortController();
  const early = await page.early;
  page.early = null;
  const rollout =
    early ?? (await get(`runs/${page.run.id}/rollouts/${step}/${row}`, {}, { signal: page.looking.signal }));
  if (!page.view.isOpen()) return;
  show(page, rollout);
  tried(() => showOthers(page, page.lenses[0], page.run, rollout)); // not awaited, so that the text is shown first
  await Promise.all([showAcross(page, rollout), showBeside(page, rollout)]);
}

function show(page, rollout) {
  page.at = rollout.row;
  page.clipAt = -1;
  for (const item of page.answers.querySelectorAll("[data-row]")) {
    item.setAttribute(
      "aria-pressed",
      item.dataset.row === String(rollout.row) && rollout.step === page.step ? "true" : "false",
    );
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

async function showOthers(page, lens, run, rollout) {
  const found = await get(`runs/${run.id}/rollouts/${rollout.step}/${rollout.row}/top_logprobs`);
  if (page.view.isOpen() && lens.rollout === rollout) lens.showOthers(found.top_logprobs);
}

/** The steps and rows at which a run answered a prompt. */
async function occurrences(run, promptId) {
  try {
    return (await get(`runs/${run.id}/prompts/${encodeURIComponent(promptId)}`)).steps;
  } catch (error) {
    if (error.status === 404) return [];
    throw error;
  }
}

/** The steps at which the same prompt was answered, as a row of scores along the slider. */
async function showAcross(page, rollout) {
  if (page.promptId !== rollout.prompt_id) {
    page.promptId = rollout.prompt_id;
    page.occurrences = await occurrences(page.run, rollout.prompt_id);
  }
  fill(
    page.across,
    page.occurrences.length > 0 && h("h3", {}, "The same prompt through training"),
    h(
      "ol",
      {},
      page.occurrences
        .slice(-200)
        .map((each) =>
          h(
            "li",
            {},
            h(
              "button",
              {
                type: "button",
                class: "answer",
                "aria-pressed": each.step === rollout.step && each.row === rollout.row ? "true" : "false",
                onclick: () => tried(() => look(page, each.step, each.row)),
              },
              h("small", {}, `step ${each.step}`),
              h("b", {}, number(each.score)),
              h("span", { class: "answer-text" }, visible(each.completion).replaceAll("\n", "↵")),
            ),
          ),
        ),
    ),
  );
  const [list, current] = [page.across.querySelector("ol"), page.across.querySelector('[aria-pressed="true"]')];
  if (list && current) list.scrollTop = current.offsetTop - list.offsetTop - list.clientHeight / 2;
}

async function showBeside(page, rollout) {
  if (!page.beside) return;
  const steps = await occurrences(page.beside, rollout.prompt_id);
  const closest = steps.toSorted((a, b) => Math.abs(a.step - rollout.step) - Math.abs(b.step - rollout.step))[0];
  const found = closest && (await get(`runs/${page.beside.id}/rollouts/${closest.step}/${closest.row}`));
  if (!page.view.isOpen()) return;
  page.lenses[1].setQuantity(page.quantity);
  page.lenses[1].show(found ?? null, "never answered this prompt");
  if (found) tried(() => showOthers(page, page.lenses[1], page.beside, found));
}

export function follow(page, which, place) {
  page.view.root.dataset.token = `${which}:${place}`;
}

/** The index of the nearest step. */
export function nearest(steps, step) {
  return steps.reduce((best, each, place) => (Math.abs(each - step) < Math.abs(steps[best] - step) ? place : best), 0);
}
