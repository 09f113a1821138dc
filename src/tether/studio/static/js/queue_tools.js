// What an owner does with queues: fill them, take votes out and in, let people in.

import { address, get, post } from "./api.js";
import { button, choose, field, fill, h } from "./dom.js";
import { notice, tried } from "./notices.js";

const FORMATS = { pair: ["pairs", "messages"], ranking: ["rankings", "pairs"], demonstration: ["messages"] };

/** The row of tools under a queue. */
export function queueTools(queue) {
  return h(
    "div",
    { class: "row" },
    h("a", { class: "button main", href: `#/label/${queue.id}` }, "Judge"),
    button("Fill", () => askFill(queue)),
    button("Import", () => askImport(queue)),
    queue.kind === "pair" &&
      button("Least sure first", () => rescore(queue), { title: "Ask first what the newest reward model is least sure of" }),
    button(queue.open ? "Close" : "Open", () => setOpen(queue, !queue.open)),
    FORMATS[queue.kind].map((format) =>
      h(
        "a",
        { class: "button", download: "", href: address(`label/queues/${queue.id}/export`, { format }) },
        `Export ${format}`,
      ),
    ),
  );
}

/** The sources that a queue can be filled from: a title, and the controls that it needs. */
function sources(runs) {
  const options = runs.map((run) => [run.id, run.name]);
  const many = () => h("input", { type: "number", min: 1, max: 5000, value: 50 });
  const repeats = () => h("input", { type: "number", min: 0, max: 0.5, step: 0.05, value: 0.1 });
  return {
    run: {
      title: "answers that runs kept",
      controls: () => ({
        run: choose(options, options[0]?.[0], () => {}),
        other_run: choose([["", "the same run"], ...options], "", () => {}),
        count: many(),
        repeats: repeats(),
      }),
    },
    uncertain: {
      title: "pairs that the reward is least sure of",
      controls: () => ({ run: choose(options, options[0]?.[0], () => {}), count: many() }),
    },
    file: {
      title: "a file or typed records",
      controls: () => ({
        text: h("textarea", {
          rows: 8,
          class: "mono",
          required: true,
          placeholder: '{"prompt": "…", "chosen": "…", "rejected": "…"}',
        }),
        repeats: repeats(),
      }),
    },
  };
}

const TITLES = {
  run: "Run",
  other_run: "Against",
  count: "How many",
  repeats: "Share asked twice, to see whether raters are consistent",
  text: "JSONL: a line an item",
};

async function askFill(queue) {
  const { runs } = await get("runs");
  const all = sources(runs);
  const form = h("form", { class: "stack" });
  let from = runs.length ? "run" : "file";
  let shown = {};
  const dialog = h("dialog", { "aria-label": `Fill ${queue.name}` }, h("h2", {}, `Fill ${queue.name}`), form);
  const draw = () => {
    shown = all[from].controls();
    fill(
      form,
      field(
        "From",
        choose(
          Object.entries(all).map(([name, each]) => [name, each.title]),
          from,
          (value) => {
            from = value;
            draw();
          },
        ),
      ),
      shown.text && field("File", fileInput(shown.text)),
      Object.entries(shown).map(([name, control]) => field(TITLES[name], control)),
      h(
        "div",
        { class: "row" },
        h("button", { class: "main" }, "Fill"),
        button("Cancel", () => dialog.close()),
      ),
    );
  };
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const values = Object.entries(shown).filter(([, control]) => control.value !== "");
    const body = Object.fromEntries(
      values.map(([name, control]) => [name, name === "text" ? control.value : Number(control.value)]),
    );
    const made = await tried(() => post(`label/queues/${queue.id}/fill`, { from, ...body }));
    if (made) finish(dialog, `${made.added} items were added`);
  });
  draw();
  show(dialog);
}

function askImport(queue) {
  const text = h("textarea", {
    rows: 8,
    class: "mono",
    required: true,
    placeholder: '{"prompt": "…", "chosen": "…", "rejected": "…"}',
  });
  const dialog = h(
    "dialog",
    { "aria-label": "Import votes" },
    h("h2", {}, `Import votes into ${queue.name}`),
    h(
      "form",
      {
        class: "stack",
        onsubmit: async (event) => {
          event.preventDefault();
          const made = await tried(() => post(`label/queues/${queue.id}/import`, { text: text.value }));
          if (made) finish(dialog, `${made.items} items with ${made.votes} votes were taken in`);
        },
      },
      field("File", fileInput(text)),
      field("JSONL: a line a record", text),
      h(
        "div",
        { class: "row" },
        h("button", { class: "main" }, "Import"),
        button("Cancel", () => dialog.close()),
      ),
    ),
  );
  show(dialog);
}

/** A file, read into a text area. */
function fileInput(text) {
  return h("input", {
    type: "file",
    accept: ".jsonl,.json,.txt",
    onchange: async (event) => {
      text.value = await event.target.files[0].text();
    },
  });
}

function show(dialog) {
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

/** Close, say what was done, and draw the page anew. */
function finish(dialog, words) {
  dialog.close();
  notice(words);
  dispatchEvent(new HashChangeEvent("hashchange"));
}

async function rescore(queue) {
  const told = await tried(() => post(`label/queues/${queue.id}/rescore`));
  if (told) notice(`${told.items} pairs are asked in the order in which ${told.by} is unsure of them.`);
}

async function setOpen(queue, open) {
  if (await tried(() => post(`label/queues/${queue.id}`, { open }))) dispatchEvent(new HashChangeEvent("hashchange"));
}

/** The people who label, and a form that lets another one in. */
export function raterTools(queues) {
  const list = h("ul", { class: "raters" });
  const name = h("input", { required: true, maxlength: 100, placeholder: "Name", "aria-label": "Name" });
  const queue = choose([["", "every open queue"], ...queues.map((each) => [each.id, each.name])], "", () => {}, {
    "aria-label": "Queue",
  });
  const link = h("output", { class: "mono" });
  const draw = async () => {
    const found = await tried(() => get("raters"));
    if (found)
      fill(
        list,
        found.raters.map((each) =>
          h("li", {}, h("b", {}, each.name), " ", h("small", {}, `${each.role}, ${each.votes} votes`)),
        ),
      );
  };
  draw();
  return h(
    "section",
    { class: "question" },
    h("h2", {}, "People"),
    list,
    h(
      "form",
      {
        class: "row",
        onsubmit: async (event) => {
          event.preventDefault();
          const made = await tried(() =>
            post("raters", {
              name: name.value,
              role: "annotator",
              queue_id: queue.value === "" ? null : Number(queue.value),
            }),
          );
          if (!made) return;
          link.textContent = `Give ${name.value} this link. It is shown once: ${made.link}`;
          name.value = "";
          draw();
        },
      },
      name,
      queue,
      h("button", {}, "Let in an annotator"),
    ),
    link,
  );
}
