// Small things that several pages show.

import { h } from "./dom.js";

const SIGNS = { running: "●", done: "✓", stopped: "■", failed: "✕", interrupted: "!" };

/** A run's state: a sign and a word, so that colour is never alone. */
export function stateMark(state) {
  return h("span", { class: `state ${state}` }, h("i", { "aria-hidden": "true" }, SIGNS[state] ?? "·"), state);
}

/** How many of how many, as a bar and in numbers. */
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

/** What the doctor found, with its reason and cure. */
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
