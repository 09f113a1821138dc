// Small parts that several pages use.

import { h } from "./dom.js";

const SIGNS = { running: "●", done: "✓", stopped: "■", failed: "✕", interrupted: "!" };

/** A run's state: a symbol and a word, so that colour is not needed. */
export function stateMark(state) {
  return h("span", { class: `state ${state}` }, h("i", { "aria-hidden": "true" }, SIGNS[state] ?? "·"), state);
}

/** The content of an empty page: one sentence, and the button for the first step. */
export function emptyState(sentence, ...actions) {
  return h("section", { class: "empty" }, h("p", {}, sentence), actions);
}

/** An explanation in a few numbered sentences, for pages that are nearly empty. */
export function howItWorks(title, ...steps) {
  return h(
    "section",
    { class: "question" },
    h("h2", {}, title),
    h(
      "ol",
      { class: "how" },
      steps.map(([name, words], place) =>
        h("li", { class: "panel" }, h("b", {}, `${place + 1}. ${name}`), h("p", {}, words)),
      ),
    ),
  );
}

/** "about 3 min left"; empty if it is not known. */
export function timeLeft(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 90) return `about ${Math.max(1, Math.round(seconds))} s left`;
  if (seconds < 5400) return `about ${Math.round(seconds / 60)} min left`;
  return `about ${(seconds / 3600).toFixed(1)} h left`;
}

/** A run's tags; `chosen(tag)` is called when one is clicked. */
export function tagChips(tags, chosen = null) {
  return tags.map((tag) =>
    chosen
      ? h("button", { type: "button", class: "tag", title: `Only runs tagged ${tag}`, onclick: () => chosen(tag) }, tag)
      : h("span", { class: "tag" }, tag),
  );
}

/** Progress as a bar and in numbers. */
export function progressBar(done, all) {
  const share = all ? Math.min(1, done / all) : 0;
  return h(
    "span",
    { class: "progress" },
    h(
      "span",
      {
        class: "bar",
        role: "progressbar",
        "aria-valuenow": done,
        "aria-valuemin": 0,
        "aria-valuemax": all,
        "aria-label": "Steps",
      },
      h("i", { style: { width: `${100 * share}%` } }),
    ),
    h("span", {}, `${done}/${all}`),
  );
}

/** A finding of the doctor, with its reason and its remedy. */
export function findingCard(finding) {
  return h(
    "details",
    { class: `finding ${finding.severity}` },
    h(
      "summary",
      {},
      h("b", {}, finding.severity),
      " ",
      finding.title,
      " ",
      h("small", {}, `steps ${finding.first_step}–${finding.last_step}`),
    ),
    h("p", {}, finding.saw),
    h("p", {}, finding.why),
    finding.change.length > 0 &&
      h(
        "ul",
        {},
        finding.change.map((each) => h("li", {}, each)),
      ),
    finding.examples.length > 0 && h("pre", {}, finding.examples.join("\n")),
  );
}
