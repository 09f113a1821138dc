// Short words that come and go at the foot of the page.

import { h } from "./dom.js";

const place = document.getElementById("notices");

/** Say something. Errors stay until they are dismissed; where a dialog is open, they stand in it. */
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

/** An error above a dialog's buttons. Sending the form again takes it away. */
function sayInside(dialog, text) {
  const form = dialog.querySelector("form") ?? dialog;
  form.querySelector(".dialog-error")?.remove();
  const box = h("p", { class: "dialog-error", role: "alert" }, text);
  form.insertBefore(box, form.lastElementChild);
  box.scrollIntoView({ block: "nearest" });
  form.addEventListener("submit", () => box.remove(), { once: true, capture: true });
  return box;
}

/** Run something, and say what went wrong if it does. `names` are what the page calls the fields of the request. */
export async function tried(work, names = {}) {
  try {
    return await work();
  } catch (error) {
    if (error.name !== "AbortError") notice(asNamed(error.message, names), "error");
    return undefined;
  }
}

/** An error of the server begins with the field that is wrong. */
function asNamed(message, names) {
  const [field, rest] = message.split(/:(.*)/s);
  return rest !== undefined && Object.hasOwn(names, field) ? `${names[field]}:${rest}` : message;
}
