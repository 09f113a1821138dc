// Train on demonstrations: the queues that hold some, and supervised fine-tuning on them.

import { get, post } from "./api.js";
import { button, choose, field, fill, h } from "./dom.js";
import { age, count, number } from "./format.js";
import { notice, tried } from "./notices.js";
import { stateMark } from "./parts.js";

/** A section of the Train page; it is hidden if there are no demonstrations. */
export function demonstrationSection(view) {
  const list = h("div", { class: "queues" });
  const section = h("section", { class: "question", hidden: true }, h("h2", {}, "Demonstrations"), list);
  tried(async () => {
    const [{ queues }, { runs }] = await Promise.all([get("label/queues"), get("runs")]);
    const written = queues.filter((queue) => queue.kind === "demonstration" && queue.votes > 0);
    const told = await Promise.all(written.map((queue) => get("train/curve", { queue: queue.id })));
    if (!view.isOpen() || !written.length) return;
    section.hidden = false;
    fill(
      list,
      written.map((queue, place) => card({ ...queue, ...told[place] }, runs)),
    );
  });
  return section;
}

function card(queue, runs) {
  return h(
    "section",
    { class: "panel queue" },
    h(
      "div",
      { class: "row" },
      h("h2", { class: "grow" }, queue.name),
      h("a", { href: `#/label/${queue.id}` }, "Write more"),
    ),
    h(
      "dl",
      { class: "latest" },
      h("div", {}, h("dt", {}, "Demonstrations"), h("dd", {}, queue.examples)),
      h("div", {}, h("dt", {}, "Since the last training"), h("dd", {}, queue.since_last)),
    ),
    queue.points.length > 0 &&
      h(
        "ol",
        { class: "jobs" },
        queue.points.toReversed().map((run) =>
          h(
            "li",
            {},
            stateMark(run.state),
            h("a", { href: `#/run/${run.id}` }, run.run),
            h("small", {}, `${count(run.votes, "demonstration")}, held-out loss ${number(run.loss)}, ${age(run.created)} ago`),
          ),
        ),
      ),
    h("div", { class: "row" }, button("Fine-tune on these (SFT)", () => askTuning(queue, runs), { kind: "main" })),
  );
}

function askTuning(queue, runs) {
  const options = runs.filter((run) => run.method !== "reward" && run.state !== "running").map((run) => [run.id, run.name]);
  const from = choose([["", "the run that the prompts came from, or the model below"], ...options], "", () => {});
  const model = h("input", { maxlength: 1000, placeholder: "a model's folder or name" });
  const steps = h("input", { type: "number", min: 1, max: 1000000, value: 60, required: true });
  const title = `Fine-tune on ${queue.name}`;
  const dialog = h(
    "dialog",
    { "aria-label": title },
    h("h2", {}, title),
    h("p", {}, "Supervised fine-tuning on the demonstrations, with their conversations and system prompts."),
    h(
      "form",
      {
        class: "stack",
        onsubmit: async (event) => {
          event.preventDefault();
          const body = { queue_id: queue.id, steps: Number(steps.value) };
          if (from.value) body.from_run = Number(from.value);
          if (model.value.trim()) body.model = model.value.trim();
          const made = await tried(() => post("train/demonstrations", body));
          if (!made) return;
          dialog.close();
          notice(`${made.name} has started`);
        },
      },
      field("The policy starts from", from),
      field("Model", model),
      field("Steps", steps),
      h(
        "div",
        { class: "row" },
        h("button", { class: "main" }, "Train"),
        button("Cancel", () => dialog.close()),
      ),
    ),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  from.focus();
}
