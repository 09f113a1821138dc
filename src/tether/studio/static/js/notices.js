// Short words that come and go at the foot of the page.

import { h } from "./dom.js";

const place = document.getElementById("notices");

/** Say something. Errors stay until they are dismissed. */
export function notice(text, kind = "note") {
  const box = h(
    "div",
    { class: `notice ${kind}`, role: kind === "error" ? "alert" : "status" },
    text,
    h("button", { type: "button", class: "quiet", "aria-label": "Dismiss", onclick: () => box.remove() }, "×"),
  );
  place.append(box);
  while (place.children.length > 3) place.firstChild.remove();
  if (kind !== "error") setTimeout(() => box.remove(), 4000);
  return box;
}

/** Run something, and say what went wrong if it does. */
export async function tried(work) {
  try {
    return await work();
  } catch (error) {
    if (error.name !== "AbortError") notice(error.message, "error");
    return undefined;
  }
}
