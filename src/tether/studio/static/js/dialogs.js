// Dialogs with a title and a form. Escape, Cancel and opening another page (main.js) close them.

import { button, h } from "./dom.js";

/**
 * Open a dialog. `send` is called on submit, and the dialog closes if it returns a truthy value. An error that it
 * throws, or reports through `tried`, is shown in the dialog.
 */
export function ask({ title, action, send, first = null }, ...parts) {
  const begin = h("button", { class: "main" }, action);
  const dialog = h(
    "dialog",
    { "aria-label": title },
    h("h2", {}, title),
    h(
      "form",
      {
        class: "stack",
        onsubmit: async (event) => {
          event.preventDefault();
          begin.disabled = true; // one submit at a time
          const done = await send();
          begin.disabled = false;
          if (done) dialog.close();
        },
      },
      ...parts,
      h(
        "div",
        { class: "row" },
        begin,
        button("Cancel", () => dialog.close()),
      ),
    ),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  (first ?? begin).focus();
  return dialog;
}

/** Close all dialogs, because another page is shown now. */
export function closeDialogs() {
  for (const each of document.querySelectorAll("dialog[open]")) each.close();
}
