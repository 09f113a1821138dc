// The owner's tools for queues: fill them, export and import votes, invite people.

import { address, get, pause, post } from "./api.js";
import { button, choose, field, fill, h } from "./dom.js";
import { askSettings, peopleList } from "./item_dialogs.js";
import { notice, tried } from "./notices.js";

const FORMATS = {
  pair: ["rankings", "pairs", "messages", "votes"],
  ranking: ["rankings", "pairs", "messages", "votes"],
  demonstration: ["messages", "votes"],
};
const FORMS = {
  rankings: "Rankings: one line per item, for training",
  pairs: "Pairs: chosen and rejected",
  messages: "Messages: demonstrations and preferred answers",
  votes: "Votes: one line per vote, with every detail",
};

/** The row of tools under a queue. */
export function queueTools(queue) {
  return h(
    "div",
    { class: "row" },
    h("a", { class: "button main", href: `#/label/${queue.id}` }, "Judge"),
    h("a", { class: "button", href: `#/label/${queue.id}/items` }, "Items"),
    button("Fill", () => askFill(queue)),
    button("Import", () => askImport(queue)),
    queue.kind === "pair" &&
      button("Uncertain first", () => rescore(queue), { title: "Ask first about the pairs that the newest reward model is most uncertain of" }),
    button(queue.open ? "Close" : "Open", () => setOpen(queue, !queue.open)),
    button("Settings", () => askSettings(queue)),
    exportMenu(queue),
  );
}

function exportMenu(queue) {
  const menu = h(
    "details",
    {
      class: "menu",
      onfocusout: (event) => {
        if (!menu.contains(event.relatedTarget)) menu.open = false;
      },
    },
    h("summary", { class: "button" }, "Export"),
    h(
      "div",
      {},
      FORMATS[queue.kind].map((format) =>
        h("a", { download: "", href: address(`label/queues/${queue.id}/export`, { format }) }, FORMS[format]),
      ),
    ),
  );
  return menu;
}

/** The sources for filling a queue: a title, and its controls. */
function sources(runs, kind) {
  const options = runs.map((run) => [run.id, run.name]);
  const many = () => h("input", { type: "number", min: 1, max: 5000, value: 50 });
  const ranked = () => h("input", { type: "number", min: 2, max: 9, value: 4 });
  const repeats = () => h("input", { type: "number", min: 0, max: 0.5, step: 0.05, value: 0.1 });
  return {
    run: {
      title: "answers that runs kept",
      controls: () => ({
        run: choose(options, options[0]?.[0], () => {}),
        other_run: choose([["", "the same run"], ...options], "", () => {}),
        ...(kind === "ranking" && { answers: ranked() }),
        count: many(),
        repeats: repeats(),
      }),
    },
    ...(kind !== "demonstration" && { model: sampling(many, repeats, kind === "ranking" ? 4 : 2) }),
    uncertain: {
      title: "pairs that the reward model is most uncertain of",
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

/** Answers of any model to any prompts, sampled in a separate process. */
function sampling(many, repeats, answers) {
  return {
    title: "answers sampled from a model",
    controls: () => ({
      model: h("input", { required: true, maxlength: 1000, placeholder: "runs/sft, a model's folder, or its name" }),
      prompts: h("input", { maxlength: 1000, placeholder: "prompts.jsonl, as the server sees it" }),
      text: h("textarea", { rows: 4, class: "mono", placeholder: '{"prompt": "…"}' }),
      answers: h("input", { type: "number", min: 2, max: 9, value: answers }),
      max_new_tokens: h("input", { type: "number", min: 1, max: 4096, value: 128 }),
      temperature: h("input", { type: "number", min: 0.01, max: 5, step: 0.01, value: 1 }),
      count: many(),
      repeats: repeats(),
    }),
  };
}

const WORDS = new Set(["text", "model", "prompts"]);
const TITLES = {
  model: "Model",
  prompts: "File of prompts on the server",
  answers: "Answers for each prompt",
  max_new_tokens: "Longest answer in tokens",
  temperature: "Temperature",
  run: "Run",
  other_run: "Against",
  count: "How many",
  repeats: "Share asked twice, to measure consistency",
  text: "JSONL: one item per line",
};

async function askFill(queue) {
  const { runs } = await get("runs");
  const all = sources(runs, queue.kind);
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
      Object.entries(shown).map(([name, control]) => [
        name === "text" && field("File", fileInput(control)),
        field(TITLES[name], control),
      ]),
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
      values.map(([name, control]) => [name, WORDS.has(name) ? control.value : Number(control.value)]),
    );
    const made = await tried(() => post(`label/queues/${queue.id}/fill`, { from, ...body }));
    if (!made) return;
    if (made.state) await follow(dialog, form, made);
    else finish(dialog, made.job ? "Sampling has started: items appear here as they are made." : `${made.added} items were added`);
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
          const form = event.target;
          const made = await tried(() => post(`label/queues/${queue.id}/import`, { text: text.value }));
          if (!made) return;
          if (made.state) await follow(dialog, form, made);
          else finish(dialog, `Imported ${made.items} items with ${made.votes} votes`);
        },
      },
      field("File", fileInput(text)),
      field("JSONL: one record per line", text),
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

/** The progress of a long import; it can be cancelled, and continues if the dialog is closed. */
async function follow(dialog, form, made) {
  const bar = h("progress", { max: made.records, value: made.done, "aria-label": "Import" });
  const said = h("p", { role: "status" }, "");
  const cancel = button("Cancel the import", () => tried(() => post(`label/imports/${made.id}/cancel`)));
  fill(form, bar, said, h("div", { class: "row" }, cancel));
  let now = made;
  while (["waiting", "running"].includes(now.state)) {
    bar.value = now.done;
    said.textContent = `${now.done} of ${now.records} records are written; voting continues meanwhile.`;
    await pause(400);
    if (!dialog.isConnected || !dialog.open) return;
    now = (await tried(() => get(`label/imports/${made.id}`))) ?? now;
  }
  if (now.state === "done") finish(dialog, `Imported ${now.items} items with ${now.votes} votes`);
  else said.textContent = now.state === "cancelled" ? "Cancelled: nothing was imported." : `The import failed: ${now.error}`;
  if (now.state !== "done") cancel.remove();
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

/** Close the dialog, report what was done, and redraw the page. */
function finish(dialog, words) {
  dialog.close();
  notice(words);
  dispatchEvent(new HashChangeEvent("hashchange"));
}

async function rescore(queue) {
  const told = await tried(() => post(`label/queues/${queue.id}/rescore`));
  if (told) notice(`${told.items} pairs are ordered: the ones that ${told.by} is most uncertain of come first.`);
}

async function setOpen(queue, open) {
  if (await tried(() => post(`label/queues/${queue.id}`, { open }))) dispatchEvent(new HashChangeEvent("hashchange"));
}

/** The people who label, and a form that invites another one. */
export function raterTools(queues) {
  const list = h("ul", { class: "raters people" });
  const name = h("input", { required: true, maxlength: 100, placeholder: "Name", "aria-label": "Name" });
  const queue = choose([["", "every open queue"], ...queues.map((each) => [each.id, each.name])], "", () => {}, {
    "aria-label": "Queue",
  });
  const link = h("output", { class: "mono" });
  const draw = async () => {
    const found = await tried(() => peopleList(queues));
    if (found) fill(list, found);
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
      h("button", {}, "Invite an annotator"),
    ),
    link,
  );
}
