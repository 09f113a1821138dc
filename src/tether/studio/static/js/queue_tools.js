// What an owner does with queues: fill them, take votes out and in, let people in.

import { address, get, post } from "./api.js";
import { button, choose, field, fill, h } from "./dom.js";
import { notice, tried } from "./notices.js";

const FORMATS = { pair: ["pairs", "messages"], ranking: ["rankings", "pairs"], demonstration: ["messages"] };

/** The row of tools under a queue. */
export function queueTools(queue) {
  return h("div", { class: "row" },
    h("a", { class: "button main", href: `#/label/${queue.id}` }, "Judge"),
    button("Fill", () => askFill(queue)),
    FORMATS[queue.kind].map((format) => h("a", { class: "button", download: "", href: address(`label/queues/${queue.id}/export`, { format }) }, `Export ${format}`)));
}

async function askFill(queue) {
  const { runs } = await get("runs");
  const options = runs.map((run) => [run.id, run.name]);
  const form = h("form", { class: "stack" });
  const controls = {
    run: () => ({
      run: choose(options, options[0]?.[0], () => {}),
      other: choose([["", "the same run"], ...options], "", () => {}),
      count: h("input", { type: "number", min: 1, max: 5000, value: 20 }),
    }),
    uncertain: () => ({
      run: choose(options, options[0]?.[0], () => {}),
      count: h("input", { type: "number", min: 1, max: 5000, value: 20 }),
    }),
    file: () => ({ rows: h("textarea", { rows: 8, class: "mono", placeholder: '{"prompt": "…", "chosen": "…", "rejected": "…"}', required: true }) }),
  };
  const titles = { run: "Run", other: "Against", count: "How many", rows: "JSONL: a line an item" };
  const kinds = [["run", "answers that runs kept"], ["uncertain", "pairs that a reward model is least sure of"], ["file", "a file"]];
  let from = "run";
  let shown = {};
  const dialog = h("dialog", { "aria-label": `Fill ${queue.name}` }, h("h2", {}, `Fill ${queue.name}`), form);
  const draw = () => {
    shown = controls[from]();
    const upload = from === "file" && h("input", { type: "file", accept: ".jsonl,.json,.txt", onchange: async (event) => { shown.rows.value = await event.target.files[0].text(); } });
    fill(form, field("From", choose(kinds, from, (value) => { from = value; draw(); })),
      upload && field("File", upload), Object.entries(shown).map(([name, control]) => field(titles[name], control)),
      h("div", { class: "row" }, h("button", { class: "main" }, "Fill"), button("Cancel", () => dialog.close())));
  };
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const made = await tried(() => sendFill(queue, from, shown));
    if (!made) return;
    dialog.close();
    notice(`${made.items ?? made.added ?? ""} items were added`);
    dispatchEvent(new HashChangeEvent("hashchange"));
  });
  dialog.addEventListener("close", () => dialog.remove());
  draw();
  document.body.append(dialog);
  dialog.showModal();
}

function sendFill(queue, from, shown) {
  const number = (control) => (control.value === "" ? null : Number(control.value));
  if (from === "file") {
    const rows = shown.rows.value.split("\n").filter((line) => line.trim()).map((line) => JSON.parse(line));
    return post(`label/queues/${queue.id}/fill`, { from, rows });
  }
  const body = { from, run: number(shown.run), count: number(shown.count) };
  if (shown.other) body.other = number(shown.other);
  return post(`label/queues/${queue.id}/fill`, body);
}

/** The people who label, and a form that lets another one in. */
export function raterTools(queues) {
  const list = h("ul", { class: "raters" });
  const name = h("input", { required: true, maxlength: 100, placeholder: "Name", "aria-label": "Name" });
  const queue = choose([["", "every open queue"], ...queues.map((each) => [each.id, each.name])], "", () => {}, { "aria-label": "Queue" });
  const link = h("output", { class: "mono" });
  const draw = async () => {
    const found = await tried(() => get("raters"));
    if (found) fill(list, found.raters.map((each) => h("li", {}, h("b", {}, each.name), " ", h("small", {}, `${each.role}, ${each.votes} votes`))));
  };
  draw();
  return h("section", { class: "question" }, h("h2", {}, "People"), list,
    h("form", { class: "row", onsubmit: async (event) => {
      event.preventDefault();
      const made = await tried(() => post("raters", { name: name.value, role: "annotator", queue_id: queue.value === "" ? null : Number(queue.value) }));
      if (!made) return;
      link.textContent = `Give ${name.value} this link. It is shown once: ${location.origin}/?token=${made.token}`;
      name.value = "";
      draw();
    } }, name, queue, h("button", {}, "Let in an annotator")), link);
}
