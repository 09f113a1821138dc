// Keyboard shortcuts: every page lists its keys, and `?` shows the list.

import { h } from "./dom.js";

let everywhere = [];
let page = [];
let prefix = "";

/** Keys of all pages: [{key, does, run}]; the two letters of a key such as "g r" are pressed one after the other. */
export function bindEverywhere(bindings) {
  everywhere = bindings;
}

/** Keys of the current page. */
export function bindPage(bindings) {
  page = bindings;
}

const FORM = new Set(["INPUT", "TEXTAREA", "SELECT"]);

function isWriting(target) {
  return FORM.has(target.tagName) && !["checkbox", "range", "radio"].includes(target.type);
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (event.key === "Escape") {
    if (isWriting(event.target)) event.target.blur();
    document.querySelector("dialog[open]")?.close();
  }
  if (document.querySelector("dialog[open]")) return;
  if (isWriting(event.target) && event.key !== "Escape") return;
  // A slider and a button keep their own keys.
  if (event.target.type === "range" && event.key.startsWith("Arrow")) return;
  if (event.target.tagName === "BUTTON" && (event.key === "Enter" || event.key === " ")) return;
  const pressed = prefix ? `${prefix} ${event.key}` : event.key;
  prefix = "";
  const found = [...page, ...everywhere].find((each) => names(each).includes(pressed));
  if (found) {
    event.preventDefault();
    found.run(event);
  } else if ([...page, ...everywhere].some((each) => names(each).some((name) => name.startsWith(`${pressed} `)))) {
    prefix = pressed;
  }
});

function names(binding) {
  return Array.isArray(binding.key) ? binding.key : [binding.key];
}

const SIGNS = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", " ": "space" };

/** The overlay that lists the keys. */
export function showKeys() {
  const list = (title, bindings) =>
    bindings.length > 0 &&
    h(
      "section",
      {},
      h("h3", {}, title),
      h(
        "dl",
        {},
        bindings.map((each) => [
          h(
            "dt",
            {},
            names(each).map((name) =>
              h(
                "kbd",
                {},
                name
                  .split(" ")
                  .map((part) => SIGNS[part] ?? part)
                  .join(" ") || "space",
              ),
            ),
          ),
          h("dd", {}, each.does),
        ]),
      ),
    );
  const overlay = h(
    "dialog",
    { class: "keys", "aria-label": "Keys" },
    h("h2", {}, "Keys"),
    list("This page", page),
    list("Everywhere", everywhere),
    h("form", { method: "dialog" }, h("button", {}, "Close")),
  );
  overlay.addEventListener("close", () => overlay.remove());
  document.body.append(overlay);
  overlay.showModal();
}
