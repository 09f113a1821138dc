// The strip under the text: one bar per token, up or down from the middle, on a canvas.

import { h, onceAFrame } from "./dom.js";
import { ink } from "./theme.js";

const HEIGHT = 64;

/** A strip. `pointed(place)` gets the token under the pointer; `chosen(place)` the one that is clicked. */
export function makeStrip({ pointed, chosen }) {
  const canvas = h("canvas", {
    class: "strip",
    height: HEIGHT,
    role: "img",
    "aria-label": "The chosen quantity, one bar per token",
  });
  let shown = { values: [], full: 1, clipped: [], at: -1 };
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    const found = Math.floor(((event.clientX - box.left) / box.width) * shown.values.length);
    return Math.max(0, Math.min(shown.values.length - 1, found));
  };
  canvas.addEventListener("pointermove", (event) => shown.values.length && pointed(place(event)));
  canvas.addEventListener("click", (event) => shown.values.length && chosen(place(event)));

  function draw() {
    const ratio = devicePixelRatio || 1;
    const width = canvas.clientWidth || 600;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(HEIGHT * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.clearRect(0, 0, width, HEIGHT);
    const { values, full, clipped, at } = shown;
    const step = width / Math.max(1, values.length);
    const oneSided = !values.some((value) => value !== null && value < 0);
    const middle = oneSided ? HEIGHT - 8 : HEIGHT / 2;
    const tall = oneSided ? HEIGHT - 14 : HEIGHT / 2 - 8;
    const [more, less] = [ink("--more"), ink("--less")];
    const thick = Math.max(0.6, step - (step > 4 ? 1 : 0));
    for (const [colour, sign] of [
      [more, 1],
      [less, -1],
    ]) {
      // one colour at a time: changing the colour is the expensive part
      pen.fillStyle = colour;
      values.forEach((value, token) => {
        if (value === null || !Number.isFinite(value) || Math.sign(value) !== sign) return;
        const size = Math.max(-1, Math.min(1, value / full)) * tall;
        pen.fillRect(token * step, Math.min(middle, middle - size), thick, Math.max(0.5, Math.abs(size)));
      });
    }
    pen.fillStyle = ink("--axis");
    pen.fillRect(0, middle, width, 1);
    pen.fillStyle = ink("--ink");
    clipped.forEach((is, token) => is && pen.fillRect(token * step, HEIGHT - 3, Math.max(1, thick), 3));
    if (at >= 0) {
      pen.strokeStyle = ink("--accent");
      pen.lineWidth = 1.5;
      pen.strokeRect(at * step - 1, 1, Math.max(3, thick + 2), HEIGHT - 2);
    }
  }

  const drawSoon = onceAFrame(draw); // after the layout of the text, so that there is only one layout

  return {
    canvas,
    /** Draw {values, full, clipped, at}; missing keys keep their values. */
    show(news) {
      shown = { ...shown, ...news };
      drawSoon();
    },
    redraw: drawSoon,
  };
}
