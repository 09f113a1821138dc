// A run's note, tags and group: shown on its page, changed in a dialog.

import { post } from "./api.js";
import { ask } from "./dialogs.js";
import { button, field, fill, h } from "./dom.js";
import { notice, tried } from "./notices.js";

/** The line under a run's name. `groups` are the existing groups. */
export function notesLine(run, groups = []) {
  const box = h("div", { class: "notes row" });
  const draw = () => {
    const has = run.note || run.tags.length || run.group;
    fill(
      box,
      run.group && h("a", { class: "tag group", href: `#/runs?group=${encodeURIComponent(run.group)}` }, run.group),
      run.tags.map((tag) => h("a", { class: "tag", href: `#/runs?tag=${encodeURIComponent(tag)}` }, tag)),
      run.note && h("p", { class: "note-text text" }, run.note),
      button(has ? "Edit notes" : "Add a note or tags", () => askNotes(run, groups, draw), { kind: "quiet", key: "e" }),
    );
  };
  draw();
  box.edit = () => askNotes(run, groups, draw);
  return box;
}

/** Edit a run's note, tags and group; `changed` is called when the server has saved them. */
export function askNotes(run, groups, changed) {
  const note = h("textarea", { rows: 5, maxlength: 10000, placeholder: "What you tried, and the result" });
  note.value = run.note;
  const tags = h("input", { value: run.tags.join(" "), placeholder: "baseline kl-sweep" });
  const names = h(
    "datalist",
    { id: "group-names" },
    groups.map((name) => h("option", { value: name })),
  );
  const group = h("input", { value: run.group, maxlength: 100, list: "group-names" });
  const send = async () => {
    const words = tags.value.split(/[\s,]+/).filter(Boolean);
    const body = { note: note.value, tags: words, group: group.value };
    const kept = await tried(() => post(`runs/${run.id}/notes`, body));
    if (!kept) return false;
    Object.assign(run, kept);
    changed();
    notice("Saved.");
    return true;
  };
  ask(
    { title: `Notes on ${run.name}`, action: "Save", send, first: note },
    field("Note", note),
    field("Tags", tags, "Separated by spaces."),
    field("Group", group, "Runs of one group are shown together in the list of runs."),
    names,
  );
}

/** The settings in which runs differ, as a table. */
export function diffTable({ runs, settings }) {
  if (!settings.length) return h("p", { class: "waiting" }, "These runs have the same settings.");
  return h(
    "div",
    { class: "wide" },
    h(
      "table",
      { class: "diff" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", { scope: "col" }, "Setting"),
          runs.map((run, place) => h("th", { scope: "col", class: `c${place % 6}` }, run.name)),
        ),
      ),
      h(
        "tbody",
        {},
        settings.map(({ key, values }) =>
          h(
            "tr",
            {},
            h("th", { scope: "row", class: "mono" }, key),
            values.map((value) => h("td", { class: "mono" }, typeof value === "string" ? value : JSON.stringify(value))),
          ),
        ),
      ),
    ),
  );
}
