// A text as Markdown or as plain characters. One key switches all texts of the page.

import { button, fill, h } from "./dom.js";
import { visible } from "./format.js";
import { markdown } from "./markdown.js";

const KEY = "tether-plain-text";
const shown = new WeakMap(); // element -> its text
let isPlain = remembered();

function remembered() {
  try {
    return localStorage.getItem(KEY) === "1";
  } catch {
    return false; // the browser has no storage for this page
  }
}

/** An element that shows a text. */
export function textBox(text, properties = {}) {
  const box = h("div", { ...properties, class: "text" });
  shown.set(box, text);
  draw(box);
  return box;
}

function draw(box) {
  const text = shown.get(box);
  box.classList.toggle("md", !isPlain);
  fill(box, !text.trim() ? "(nothing)" : isPlain ? visible(text) : markdown(text));
}

/** Switch every text between Markdown and plain. */
function togglePlain() {
  isPlain = !isPlain;
  try {
    localStorage.setItem(KEY, isPlain ? "1" : "0");
  } catch {
    // without storage, the choice lasts until the page is closed
  }
  for (const box of document.querySelectorAll(".text")) if (shown.has(box)) draw(box);
  for (const each of document.querySelectorAll(".plain-toggle")) each.setAttribute("aria-pressed", String(isPlain));
}

/** The button that switches it; the key m does the same. */
export function plainToggle() {
  return button("Plain text", togglePlain, { key: "m", kind: "plain-toggle", "aria-pressed": String(isPlain) });
}

export const plainKey = { key: "m", does: "Markdown or plain text", run: togglePlain };

/** The prompt: a text, or a list of messages with their roles. */
export function promptBox(prompt) {
  const messages = typeof prompt === "string" ? [{ role: "user", content: prompt }] : prompt;
  return h(
    "div",
    { class: "prompt", tabindex: 0, role: "group", "aria-label": "Prompt" },
    messages.map((each) => h("div", { class: `turn-${each.role}` }, h("small", {}, each.role), textBox(each.content ?? ""))),
  );
}

/** A mark on an answer that the length limit cut off. */
export function cutMark(answer) {
  return answer.ended === false && h("span", { class: "cut", title: "The length limit cut this answer off" }, "cut off");
}
