// Parts of the pages about sweeps: numbers with their intervals, and the effect of a key as a picture.

import { h, svg } from "./dom.js";
import { number, percent } from "./format.js";

/** "0.81 [0.74, 0.88]"; a dash where there is none. */
export function valueWithInterval(interval) {
  if (!interval) return "–";
  const mean = number(interval.mean);
  return interval.low === null ? mean : `${mean} [${number(interval.low)}, ${number(interval.high)}]`;
}

/** The settings of a row in words: "ppo.clip_range 0.1, kl.coef 0". */
export function inWords(values) {
  return Object.entries(values)
    .map(([key, value]) => `${key} ${value}`)
    .join(", ");
}

/** The part of a setting that differs from the recipe. */
export function differing(values, own) {
  const changed = Object.fromEntries(Object.entries(values).filter(([key, value]) => value !== own[key]));
  return Object.keys(changed).length ? inWords(changed) : "the recipe itself";
}

/** The effect of one key: each value with a dot and its interval, all on one scale. */
export function effectPanel(effect, [low, high]) {
  return h(
    "section",
    { class: "panel effect" },
    h("h3", {}, effect.key),
    h(
      "table",
      {},
      h(
        "tbody",
        {},
        effect.values.map((each) =>
          h(
            "tr",
            { class: each.best ? "best" : "" },
            h("th", { scope: "row" }, each.value, each.value === effect.own && h("small", {}, " recipe")),
            h("td", { class: "track" }, whisker(each.interval, low, high)),
            h("td", { class: "figure" }, each.diverged ? `${each.diverged} diverged` : number(each.interval?.mean)),
            h("td", { class: "figure" }, percent(each.chance)),
          ),
        ),
      ),
    ),
  );
}

/** The range that holds all intervals of all effects. */
export function rangeOf(effects) {
  const ends = effects
    .flatMap((effect) => effect.values)
    .filter((each) => each.interval)
    .flatMap(({ interval }) => [interval.mean, interval.low ?? interval.mean, interval.high ?? interval.mean]);
  return ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
}

function whisker(interval, low, high) {
  const x = (value) => 6 + ((value - low) / (high - low || 1)) * 148;
  const picture = svg("svg", { class: "whisker", viewBox: "0 0 160 16", width: 160, height: 16, "aria-hidden": "true" });
  if (!interval) return picture;
  if (interval.low !== null) picture.append(svg("path", { d: `M${x(interval.low)} 8H${x(interval.high)}` }));
  picture.append(svg("circle", { cx: x(interval.mean), cy: 8, r: 4 }));
  return picture;
}
