// Start a run: a form made from the method's settings, each with its help.

import { get, post } from "../api.js";
import { button, choose, fill, h } from "../dom.js";
import { bindPage } from "../keys.js";
import { notice, tried } from "../notices.js";
import { plain } from "../run_actions.js";

export async function open(view) {
  const { methods } = await get("methods");
  const method = view.query.get("method") ?? "ppo";
  const { fields } = await get(`schema/${encodeURIComponent(method)}`);
  const page = { view, method, methods, fields, changed: new Map(), words: "" };
  build(page);
}

function build(page) {
  page.sections = h("div", {});
  page.summary = h("span", { class: "grow", role: "status" });
  page.search = h("input", {
    type: "search",
    placeholder: "Find a setting",
    "aria-label": "Find a setting",
    oninput: (event) => {
      page.words = event.target.value.toLowerCase();
      draw(page);
    },
  });
  fill(
    page.view.root,
    h(
      "div",
      { class: "head" },
      h("h1", {}, "New run"),
      choose(
        page.methods.map((each) => [each.name, each.name]),
        page.method,
        (name) => {
          location.hash = `#/start?method=${name}`;
        },
        { "aria-label": "Method" },
      ),
      h("small", { class: "grow" }, page.methods.find((each) => each.name === page.method)?.summary),
      page.search,
    ),
    h(
      "form",
      {
        onsubmit: (event) => {
          event.preventDefault();
          start(page);
        },
      },
      page.sections,
      h(
        "div",
        { class: "row start-bar" },
        page.summary,
        h("button", { class: "main" }, "Start"),
        button("Cancel", () => history.back()),
      ),
    ),
  );
  bindPage([{ key: "/", does: "Find a setting", run: () => page.search.focus() }]);
  draw(page);
  say(page);
}

function draw(page) {
  const groups = new Map();
  for (const field of page.fields) {
    if (field.key === "run.directory" || field.key === "store.url") continue; // set by the workspace
    if (!`${field.key} ${field.description}`.toLowerCase().includes(page.words)) continue;
    const section = field.key.includes(".") ? field.key.split(".")[0] : "general";
    if (!groups.has(section)) groups.set(section, []);
    groups.get(section).push(field);
  }
  const opened = new Set(["general", "run", "model", "data"]);
  fill(
    page.sections,
    [...groups].map(([name, fields]) =>
      h(
        "details",
        { class: "question", open: opened.has(name) || page.words !== "" },
        h("summary", {}, h("h2", {}, name), h("small", {}, fields.length)),
        h(
          "div",
          { class: "start-grid" },
          fields.map((field) => control(page, field)),
        ),
      ),
    ),
  );
}

function control(page, field) {
  const box = h("label", { class: `field${page.changed.has(field.key) ? " changed" : ""}` });
  const taken = (text) => {
    if (text === written(field.default)) page.changed.delete(field.key);
    else page.changed.set(field.key, text);
    box.classList.toggle("changed", page.changed.has(field.key));
    say(page);
  };
  const now = page.changed.get(field.key) ?? written(field.default);
  const words =
    field.choices ?? (field.type.includes("true") || field.type.startsWith("bool") ? ["true", "false"] : null);
  const input = words
    ? choose(
        [...new Set([now, ...words.map(written)])].map((word) => [word, word === "" ? "none" : word]),
        now,
        taken,
      )
    : h("input", {
        value: now,
        placeholder: field.required ? "required" : "none",
        required: field.required,
        oninput: (event) => taken(event.target.value),
      });
  input.setAttribute("name", field.key);
  box.append(
    h("span", { class: "field-name mono" }, field.key),
    input,
    h("small", {}, `${field.description} (${field.type})`),
  );
  return box;
}

/** A default value as text. */
function written(value) {
  if (value === null || value === undefined) return "";
  return typeof value === "string" ? value : JSON.stringify(value);
}

function say(page) {
  const many = page.changed.size;
  page.summary.textContent = many
    ? `${many} ${many === 1 ? "setting differs" : "settings differ"} from the defaults`
    : "All defaults";
}

async function start(page) {
  const settings = Object.fromEntries([...page.changed].map(([key, text]) => [key, text === "" ? null : plain(text)]));
  const made = await tried(() => post("runs", { method: page.method, settings }));
  if (!made) return;
  notice(`${made.name} has started`);
  location.hash = "#/runs";
}
