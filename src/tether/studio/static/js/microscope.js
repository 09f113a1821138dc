// One rollout in the microscope: its text, its strip, and the numbers of the token under the pointer.

import { fill, h } from "./dom.js";
import { fixed, number, visible } from "./format.js";
import { COLUMN_TITLES, QUANTITIES, coloured, reach } from "./palette.js";
import { makeStrip } from "./strip.js";
import { makeTokenText } from "./token_text.js";

/** A lens. `name` is the run. `followed(place)` is called when the pointer moves to another token. */
export function makeLens({ title, followed = () => {} }) {
  const heading = h("div", { class: "lens-head" });
  const numbers = h("dl", { class: "numbers", "aria-live": "polite" });
  const text = makeTokenText({ pointed: (place) => point(place) });
  const strip = makeStrip({ pointed: (place) => point(place), chosen: (place) => text.go(place) });
  const frame = h("section", { class: "lens", "aria-label": title }, heading, text.box, strip.canvas, numbers);
  let rollout = null;
  let others = null; // the most likely tokens at each position; they arrive after the text
  let quantity = "advantage";
  let at = -1;

  function point(place) {
    if (!rollout || !(place in rollout.pieces)) return;
    at = place;
    text.mark(place);
    strip.show({ at: place });
    const value = (name) => rollout.columns[name][place];
    const names = Object.keys(COLUMN_TITLES).filter((name) => rollout.columns[name]);
    fill(
      numbers,
      h(
        "div",
        { class: "piece" },
        h("dt", {}, `token ${place}${rollout.response[place] ? "" : ", prompt"}`),
        h("dd", {}, h("code", {}, shownPiece(rollout.pieces[place]))),
      ),
      rollout.response[place] &&
        names.map((name) =>
          h(
            "div",
            { class: name === quantity ? "chosen" : "" },
            h("dt", {}, COLUMN_TITLES[name]),
            h("dd", {}, name === "clipped" ? (value(name) ? "yes" : "no") : fixed(value(name))),
          ),
        ),
      top_logprobs(place),
    );
    followed(place);
  }

  function top_logprobs(place) {
    const found = others?.[place];
    if (!found?.length) return null;
    return h(
      "div",
      { class: "top_logprobs" },
      h("dt", {}, "other likely tokens"),
      h(
        "dd",
        {},
        found.map(([piece, logprob]) =>
          h("span", {}, h("code", {}, shownPiece(piece)), h("small", {}, chance(logprob))),
        ),
      ),
    );
  }

  function colour() {
    if (!rollout) return;
    const values = coloured(rollout, quantity);
    const full = reach(values);
    text.colour(rollout, values, full);
    strip.show({
      values,
      full,
      clipped: (rollout.columns.clipped ?? []).map((is, place) => is && rollout.response[place]),
    });
    frame.dataset.full = full;
  }

  return {
    frame,
    text,
    get rollout() {
      return rollout;
    },
    /** Show a rollout, or a message that there is none. */
    show(found, absent = "") {
      [rollout, others, at] = [found, null, -1];
      fill(numbers, h("p", { class: "hint" }, "Point at a token, or press Tab and use the arrow keys."));
      if (!found) {
        fill(heading, h("b", {}, title), h("small", {}, absent));
        text.show({ pieces: [] });
        strip.show({ values: [], clipped: [], at: -1 });
        return;
      }
      const parts = Object.entries(found.parts ?? {});
      fill(
        heading,
        h("b", {}, title),
        h("small", {}, `step ${found.step}, row ${found.row}`),
        h("span", {}, "score ", h("b", {}, number(found.score))),
        parts.length > 1 && parts.map(([name, value]) => h("small", {}, `${name} ${number(value)}`)),
        h("small", {}, `${found.response.filter(Boolean).length} tokens, ended by ${found.finish}`),
      );
      text.show(found);
      strip.show({ at: -1 });
      colour();
    },
    /** The most likely tokens of the rollout that is shown. */
    showOthers(found) {
      others = found;
      if (at >= 0) point(at);
    },
    setQuantity(name) {
      quantity = name;
      colour();
    },
    redraw: () => strip.redraw(),
  };
}

/** A piece with visible spaces and line breaks. */
function shownPiece(piece) {
  return piece === "" ? "∅" : JSON.stringify(visible(piece)).slice(1, -1).replaceAll(" ", "␣");
}

/** A log-prob as a percentage. */
function chance(logprob) {
  const percent = 100 * Math.exp(logprob);
  return `${percent >= 10 ? Math.round(percent) : fixed(percent, 1)} %`;
}

/** The quantities that a rollout has. */
export function quantitiesOf(rollout) {
  return Object.keys(QUANTITIES).filter((name) => rollout?.columns[name]?.some((value) => value !== null));
}
