// Dialogs: a title, a form, Escape and Cancel close them, and so does going to another page (main.js).

import { button, h } from "./dom.js";

/**
 * Ask something. `send` is called when the form is sent, and the dialog closes if it returns something true; what it
 * throws, or says through `tried`, is shown in the dialog.
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
          begin.disabled = true; // one at a time
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

/** Close whatever is open: another page is shown now. */
export function closeDialogs() {
  for (const each of document.querySelectorAll("dialog[open]")) each.close();
}
