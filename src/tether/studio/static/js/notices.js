// Short messages at the bottom of the page.

import { h } from "./dom.js";

const place = document.getElementById("notices");

/** Show a message. Errors stay until they are dismissed; while a dialog is open, they are shown in it. */
export function notice(text, kind = "note") {
  const dialog = kind === "error" && document.querySelector("dialog[open]");
  if (dialog) return sayInside(dialog, text);
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

/** An error above a dialog's buttons. Submitting the form again removes it. */
function sayInside(dialog, text) {
  const form = dialog.querySelector("form") ?? dialog;
  form.querySelector(".dialog-error")?.remove();
  const box = h("p", { class: "dialog-error", role: "alert" }, text);
  form.insertBefore(box, form.lastElementChild);
  box.scrollIntoView({ block: "nearest" });
  form.addEventListener("submit", () => box.remove(), { once: true, capture: true });
  return box;
}

/** Run a function and report its error. `names` maps fields of the request to their labels on the page. */
export async function tried(work, names = {}) {
  try {
    return await work();
  } catch (error) {
    if (error.name !== "AbortError") notice(asNamed(error.message, names), "error");
    return undefined;
  }
}

/** An error of the server starts with the name of the wrong field. */
function asNamed(message, names) {
  const [field, rest] = message.split(/:(.*)/s);
  return rest !== undefined && Object.hasOwn(names, field) ? `${names[field]}:${rest}` : message;
}
