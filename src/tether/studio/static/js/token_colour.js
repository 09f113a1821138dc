// The quantity that colours tokens: the buttons, the legend, and the current choice.

import { fill, h } from "./dom.js";
import { QUANTITIES, SHADES } from "./palette.js";

export function drawQuantities(page, has) {
  page.has = has;
  fill(
    page.quantities,
    has.map((name) =>
      h(
        "button",
        {
          type: "button",
          "aria-pressed": name === page.quantity ? "true" : "false",
          onclick: () => setQuantity(page, name),
        },
        QUANTITIES[name].title,
      ),
    ),
  );
  const [low, high] = QUANTITIES[page.quantity].says;
  const swatches = (sign, order) => order.map((step) => h("i", { class: `t ${sign}${step}` }));
  const steps = Array.from({ length: SHADES }, (_, place) => place + 1);
  fill(
    page.legend,
    low && [low, h("span", { class: "ramp" }, swatches("n", steps.toReversed()))],
    h("span", { class: "ramp" }, swatches("p", steps)),
    high,
    h("span", { class: "t clipped" }, "clipped"),
  );
}

function setQuantity(page, name) {
  page.quantity = name;
  localStorage.setItem("quantity", name);
  drawQuantities(page, page.has);
  page.lenses.forEach((lens) => lens.setQuantity(name));
}

export function turn(page, by) {
  if (!page.has?.length) return;
  const place = (page.has.indexOf(page.quantity) + by + page.has.length) % page.has.length;
  setQuantity(page, page.has[place]);
}
