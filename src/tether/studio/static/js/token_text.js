// An answer as tokens: one span per token, coloured by class; the arrow keys move between tokens.

import { fill, h } from "./dom.js";
import { visible } from "./format.js";
import { shade } from "./palette.js";

// Tokens are in blocks that end with a line, so that the browser lays out and paints only visible blocks.
const BLOCK = 64;
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/;

/** The text of a rollout. `pointed(place)` gets the token under the pointer or with the focus. */
export function makeTokenText({ pointed }) {
  const box = h("div", {
    class: "tokens",
    role: "group",
    "aria-label": "Tokens of the answer; use the arrow keys to move",
    tabindex: 0,
  });
  let spans = [];
  let at = -1;
  const placeOf = (event) => Number(event.target.closest?.("[data-t]")?.dataset.t ?? -1);
  box.addEventListener("pointerover", (event) => placeOf(event) >= 0 && pointed(placeOf(event)));
  box.addEventListener("click", (event) => placeOf(event) >= 0 && go(placeOf(event)));
  box.addEventListener("keydown", (event) => {
    const by = {
      ArrowLeft: -1,
      ArrowRight: 1,
      ArrowUp: -12,
      ArrowDown: 12,
      PageUp: -100,
      PageDown: 100,
      Home: -Infinity,
      End: Infinity,
    }[event.key];
    if (by === undefined || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    go(Math.max(0, Math.min(spans.length - 1, (at < 0 ? 0 : at) + by)));
  });

  function go(place) {
    mark(place);
    spans[place]?.scrollIntoView({ block: "nearest" });
    pointed(place);
  }

  function mark(place) {
    spans[at]?.classList.remove("at");
    at = place;
    spans[at]?.classList.add("at");
  }

  return {
    box,
    go,
    mark,
    /** Show the rollout's pieces. */
    show(rollout) {
      at = -1;
      spans = rollout.pieces.map((piece, place) => {
        const span = document.createElement("span");
        span.dataset.t = place;
        span.textContent = written(piece);
        if (RIGHT_TO_LEFT.test(piece)) span.dataset.bidi = ""; // isolating every token would make long answers slow
        return span;
      });
      fill(box, blocks(spans, rollout.pieces));
    },
    /** Colour every token; `values` are null off the answer. */
    colour(rollout, values, full) {
      const clipped = rollout.columns.clipped ?? [];
      spans.forEach((span, place) => {
        const kind = rollout.response[place] ? shade(values[place], full) : "off";
        span.className = `t ${kind}${clipped[place] && rollout.response[place] ? " clipped" : ""}${place === at ? " at" : ""}`;
      });
    },
  };
}

/** The spans in blocks; each block but the last ends with a line break, because the next one starts a new line. */
function blocks(spans, pieces) {
  const found = [];
  let block = null;
  spans.forEach((span, place) => {
    block ??= found[found.push(document.createElement("div")) - 1];
    block.append(span);
    if (block.childElementCount >= BLOCK && pieces[place].endsWith("\n")) block = null;
  });
  return found;
}

/** A piece as it is shown: a line break is visible and breaks the line; an empty piece has a symbol. */
function written(piece) {
  return piece === "" ? "∅" : visible(piece).replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
}
