// The extras of a vote: a rating from 1 to 7 on each axis, and a comment.

import { h } from "./dom.js";

const LOWEST = 1;
const HIGHEST = 7;

/** Ratings of one answer. Digits and arrows set the focused axis; a digit moves to the next axis. */
export function ratingPanel(axes, name) {
  const given = {};
  const rows = axes.map((axis) => ratingRow(axis, name, given));
  return {
    box: h("div", { class: "ratings" }, rows),
    first: rows[0],
    value: () => ({ ...given }),
  };
}

function ratingRow(axis, name, given) {
  const marks = [];
  const set = (value) => {
    given[axis] = value;
    marks.forEach((mark, place) => {
      const is = place + LOWEST === value;
      mark.setAttribute("aria-checked", String(is));
      mark.classList.toggle("at", is);
    });
    row.setAttribute("aria-valuetext", `${value} of ${HIGHEST}`);
  };
  for (let value = LOWEST; value <= HIGHEST; value += 1) {
    marks.push(
      h(
        "span",
        { class: "mark", role: "radio", "aria-checked": "false", "aria-label": `${axis} ${value}`, onclick: () => set(value) },
        value,
      ),
    );
  }
  const row = h(
    "div",
    {
      class: "rating",
      role: "radiogroup",
      tabindex: 0,
      "data-axis": axis,
      "aria-label": `${name}: ${axis}, ${LOWEST} to ${HIGHEST}`,
      onclick: (event) => event.stopPropagation(), // this click is not a vote
      onkeydown: (event) => {
        const digit = Number(event.key);
        if (digit >= LOWEST && digit <= HIGHEST) {
          set(digit);
          goTo(row, 1);
        } else if (event.key === "ArrowRight") set(Math.min(HIGHEST, (given[axis] ?? LOWEST - 1) + 1));
        else if (event.key === "ArrowLeft") set(Math.max(LOWEST, (given[axis] ?? HIGHEST + 1) - 1));
        else if (event.key === "ArrowDown") goTo(row, 1);
        else if (event.key === "ArrowUp") goTo(row, -1);
        else if (event.key === "Escape") row.blur();
        else return;
        event.preventDefault();
      },
    },
    h("span", { class: "axis" }, axis),
    h("span", { class: "marks" }, marks),
  );
  return row;
}

/** Focus the next axis, or the first axis of the next answer; after the last one, focus nothing. */
function goTo(row, by) {
  const all = [...document.querySelectorAll(".rating")];
  const next = all[all.indexOf(row) + by];
  if (next) next.focus();
  else if (by > 0) row.blur();
}

/** A line for a comment. Escape leaves it and keeps the text. */
export function commentBox() {
  return h("textarea", {
    class: "comment",
    rows: 1,
    maxlength: 5000,
    placeholder: "Comment (optional)",
    "aria-label": "Comment",
  });
}
