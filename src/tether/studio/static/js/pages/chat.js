// Chat: talk to one run's model, or to two side by side. Any answer can be sent to a label queue.

import { get, post } from "../api.js";
import { button, choose, fill, h } from "../dom.js";
import { visible } from "../format.js";
import { bindPage } from "../keys.js";
import { notice, tried } from "../notices.js";

export async function open(view) {
  const [{ runs }, { queues }] = await Promise.all([get("runs"), get("label/queues")]);
  const talkers = runs.filter((run) => run.method !== "reward" && run.step > 0);
  if (!talkers.length) {
    fill(
      view.root,
      h(
        "div",
        { class: "empty" },
        h("h1", {}, "Chat"),
        "No run has a model to talk to yet. Train one first.",
        h("a", { href: "#/runs" }, "Runs"),
      ),
    );
    return;
  }
  const page = {
    view,
    runs: talkers,
    queues: queues.filter((queue) => queue.open),
    turns: [],
    busy: false,
    left: view.query.get("run") ?? talkers[0].id,
    right: view.query.get("beside") ?? "",
  };
  build(page);
}

function build(page) {
  const options = page.runs.map((run) => [run.id, run.name]);
  page.log = h("ol", { class: "chat-log", "aria-live": "polite" });
  page.text = h("textarea", {
    rows: 3,
    placeholder: "Say something",
    "aria-label": "Message",
    onkeydown: (event) => {
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        say(page);
      }
    },
  });
  page.length = h("input", { type: "number", min: 1, max: 4096, value: 64, "aria-label": "Longest answer in tokens" });
  page.temperature = h("input", { type: "number", min: 0, max: 5, step: 0.1, value: 0.7, "aria-label": "Temperature" });
  fill(
    page.view.root,
    h(
      "div",
      { class: "head" },
      h("h1", {}, "Chat"),
      choose(
        options,
        page.left,
        (id) => {
          page.left = id;
        },
        { "aria-label": "Run" },
      ),
      h("span", {}, "beside"),
      choose(
        [["", "nothing"], ...options],
        page.right,
        (id) => {
          page.right = id;
          draw(page);
        },
        { "aria-label": "Beside" },
      ),
      h("span", { class: "grow" }),
      h("label", { class: "inline" }, "tokens", page.length),
      h("label", { class: "inline" }, "temperature", page.temperature),
      button(
        "Start over",
        () => {
          page.turns = [];
          draw(page);
        },
        { key: "n" },
      ),
    ),
    page.log,
    h(
      "form",
      {
        class: "chat-box",
        onsubmit: (event) => {
          event.preventDefault();
          say(page);
        },
      },
      page.text,
      h("button", { class: "main" }, "Send", h("kbd", {}, "Enter")),
    ),
  );
  bindPage([
    { key: ["e", "/"], does: "Write", run: () => page.text.focus() },
    {
      key: "n",
      does: "Start over",
      run: () => {
        page.turns = [];
        draw(page);
      },
    },
    {
      key: "l",
      does: "Send the last answers to a label queue",
      run: () => page.turns.length && sendToQueue(page, page.turns.at(-1)),
    },
  ]);
  draw(page);
  page.text.focus();
}

/** One turn: what was asked, and what each side said. Each side hears its own answers only. */
async function say(page) {
  const said = page.text.value.trim();
  if (!said || page.busy) return;
  page.busy = true;
  page.text.value = "";
  const turn = {
    said,
    answers: [page.left, page.right]
      .filter((id) => id !== "")
      .map((id) => ({ id, name: nameOf(page, id), text: null })),
  };
  page.turns.push(turn);
  draw(page);
  const limits = { max_new_tokens: Number(page.length.value), temperature: Number(page.temperature.value) };
  await Promise.all(
    turn.answers.map(async (answer, side) => {
      const heard = await tried(() =>
        post("chat", { run: Number(answer.id), messages: conversation(page, side), ...limits }),
      );
      answer.text = heard?.text ?? "";
      answer.failed = !heard;
      answer.finish = heard?.finish ?? "";
      draw(page);
    }),
  );
  page.busy = false;
  page.text.focus();
}

function conversation(page, side) {
  return page.turns.flatMap((turn) => {
    const answer = turn.answers[Math.min(side, turn.answers.length - 1)].text;
    return [{ role: "user", content: turn.said }, ...(answer === null ? [] : [{ role: "assistant", content: answer }])];
  });
}

function nameOf(page, id) {
  return page.runs.find((run) => String(run.id) === String(id))?.name ?? "";
}

function draw(page) {
  fill(
    page.log,
    page.turns.length === 0 && h("li", { class: "empty" }, "Nothing said yet."),
    page.turns.map((turn) =>
      h(
        "li",
        { class: "turn" },
        h("div", { class: "said text" }, turn.said),
        h(
          "div",
          { class: turn.answers.length > 1 ? "pair" : "single" },
          turn.answers.map((answer) =>
            h(
              "div",
              { class: "heard panel" },
              h("small", {}, answer.name, answer.finish === "length" ? ", cut off" : ""),
              h(
                "div",
                { class: "text" },
                answer.text === null ? "…" : answer.failed ? "(no answer)" : visible(answer.text) || "(nothing)",
              ),
            ),
          ),
        ),
        h(
          "div",
          { class: "row" },
          button("To a label queue", () => sendToQueue(page, turn), { kind: "quiet" }),
        ),
      ),
    ),
  );
  page.log.lastElementChild?.scrollIntoView({ block: "end" });
}

/** Two answers become a pair; one becomes a prompt to answer better. */
function sendToQueue(page, turn) {
  const wants = turn.answers.length > 1 ? "pair" : "demonstration";
  const fitting = page.queues.filter((queue) => queue.kind === wants);
  if (!fitting.length) {
    notice(`Make a queue of kind "${wants}" first, on the Label page.`, "error");
    return;
  }
  const where = choose(
    fitting.map((queue) => [queue.id, queue.name]),
    fitting[0].id,
    () => {},
  );
  const dialog = h(
    "dialog",
    { "aria-label": "Send to a label queue" },
    h("h2", {}, "Send to a label queue"),
    h(
      "form",
      {
        class: "stack",
        onsubmit: async (event) => {
          event.preventDefault();
          const prompt = conversation({ turns: page.turns.slice(0, page.turns.indexOf(turn)) }, 0).concat({
            role: "user",
            content: turn.said,
          });
          const record = wants === "pair" ? { prompt, answers: turn.answers.map((answer) => answer.text) } : { prompt };
          const made = await tried(() => post(`label/queues/${where.value}/fill`, { from: "chat", records: [record] }));
          if (!made) return;
          dialog.close();
          notice("Sent.");
        },
      },
      where,
      h(
        "div",
        { class: "row" },
        h("button", { class: "main" }, "Send"),
        button("Cancel", () => dialog.close()),
      ),
    ),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
