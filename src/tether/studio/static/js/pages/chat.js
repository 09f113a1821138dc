// Chat with one run's model, or with two side by side. Any answer can be sent to a label queue.

import { get, hear, post } from "../api.js";
import { ask } from "../dialogs.js";
import { button, choose, field, fill, h } from "../dom.js";
import { visible } from "../format.js";
import { bindPage } from "../keys.js";
import { notice, tried } from "../notices.js";
import { emptyState } from "../parts.js";

const ENDS = { length: ", cut off", stopped: ", stopped" };

export async function open(view) {
  const [{ runs }, { queues }] = await Promise.all([get("runs"), get("label/queues")]);
  const talkers = runs.filter((run) => run.method !== "reward" && run.step > 0);
  if (!talkers.length) {
    fill(
      view.root,
      h("div", { class: "head" }, h("h1", {}, "Chat")),
      emptyState(
        "No run has a model to talk to yet.",
        h("a", { class: "button main", href: "#/start" }, "Train a model"),
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
  view.onClose(() => stop(page));
}

function build(page) {
  const options = page.runs.map((run) => [run.id, run.name]);
  page.log = h("ol", { class: "chat-log", "aria-live": "polite" });
  page.text = h("textarea", {
    rows: 3,
    placeholder: "Message",
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
          draw(page);
        },
        { "aria-label": "Run" },
      ),
      h("span", {}, "next to"),
      choose(
        [["", "no other run"], ...options],
        page.right,
        (id) => {
          page.right = id;
          draw(page);
        },
        { "aria-label": "Second run" },
      ),
      h("span", { class: "grow" }),
      h("label", { class: "inline" }, "tokens", page.length),
      h("label", { class: "inline" }, "temperature", page.temperature),
      button(
        "Start over",
        () => startOver(page),
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
      (page.stopButton = button("Stop", () => stop(page), { key: "Esc", hidden: true })),
    ),
  );
  bindPage([
    { key: ["e", "/"], does: "Write", run: () => page.text.focus() },
    { key: "Escape", does: "Stop the answer", run: () => stop(page) },
    {
      key: "n",
      does: "Start over",
      run: () => startOver(page),
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

function startOver(page) {
  stop(page);
  page.turns = [];
  draw(page);
}

/** One turn: the question, and the answer of each side. Each side sees only its own answers. */
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
  page.stopper = new AbortController();
  const limits = { max_new_tokens: Number(page.length.value), temperature: Number(page.temperature.value) };
  await Promise.all(
    turn.answers.map((answer, side) => {
      const question = { run: Number(answer.id), messages: conversation(page, side), stream: true, ...limits };
      return listen(page, answer, question);
    }),
  );
  page.stopper = null;
  page.busy = false;
  draw(page);
  page.text.focus();
}

/** Show an answer as it is streamed. If it is stopped, the text so far stays. */
async function listen(page, answer, question) {
  const { signal } = page.stopper;
  const whole = await tried(async () => {
    try {
      for await (const [kind, data] of hear("chat", question, signal)) {
        if (kind === "error") throw new Error(data.error);
        if (kind === "done") answer.finish = data.finish;
        if (kind === "token") {
          answer.text = (answer.text ?? "") + data.text;
          answer.box.textContent = visible(answer.text);
          page.log.lastElementChild?.scrollIntoView({ block: "end" });
        }
      }
    } catch (error) {
      if (error.name !== "AbortError") throw error;
      answer.finish = "stopped";
    }
    return true;
  });
  answer.failed = !whole;
  answer.text ??= "";
}

function stop(page) {
  page.stopper?.abort();
}

function conversation(page, side) {
  return page.turns.flatMap((turn) => {
    const answer = turn.answers[Math.min(side, turn.answers.length - 1)].text;
    return [{ role: "user", content: turn.said }, ...(answer === null ? [] : [{ role: "assistant", content: answer }])];
  });
}

function words(page, answer) {
  if (answer.failed) return "(no answer)";
  return visible(answer.text ?? "") || (page.busy && !answer.finish ? "…" : "(nothing)");
}

function nameOf(page, id) {
  return page.runs.find((run) => String(run.id) === String(id))?.name ?? "";
}

function draw(page) {
  page.stopButton.hidden = !page.busy;
  page.log.setAttribute("aria-busy", String(page.busy)); // screen readers read the whole answer, not each token
  fill(
    page.log,
    page.turns.length === 0 &&
      h(
        "li",
        {},
        emptyState(
          `Write a message to ${[page.left, page.right].filter((id) => id !== "").map((id) => nameOf(page, id)).join(" and ")}.`,
          button("Write a message", () => page.text.focus(), { key: "e", kind: "main" }),
        ),
      ),
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
              h("small", {}, answer.name, ENDS[answer.finish] ?? ""),
              (answer.box = h("div", { class: "text" }, words(page, answer))),
            ),
          ),
        ),
        h(
          "div",
          { class: "row" },
          button("Send to a label queue", () => sendToQueue(page, turn), { kind: "quiet" }),
        ),
      ),
    ),
  );
  page.log.lastElementChild?.scrollIntoView({ block: "end" });
}

/** Two answers become a pair; one becomes a prompt for a better answer. */
function sendToQueue(page, turn) {
  const wants = turn.answers.length > 1 ? "pair" : "demonstration";
  const fitting = page.queues.filter((queue) => queue.kind === wants);
  if (!fitting.length) {
    notice(`There is no open queue of kind "${wants}". Make one on the Label page.`, "error");
    return;
  }
  const where = choose(
    fitting.map((queue) => [queue.id, queue.name]),
    fitting[0].id,
    () => {},
  );
  const send = async () => {
    const before = conversation({ turns: page.turns.slice(0, page.turns.indexOf(turn)) }, 0);
    const prompt = [...before, { role: "user", content: turn.said }];
    const ended = turn.answers.map((answer) => answer.finish === "stop");
    const record = wants === "pair" ? { prompt, answers: turn.answers.map((answer) => answer.text), ended } : { prompt };
    const made = await tried(() => post(`label/queues/${where.value}/fill`, { from: "chat", records: [record] }));
    if (made) notice("Sent to the queue.");
    return made;
  };
  ask({ title: "Send to a label queue", action: "Send", send, first: where }, field("Queue", where));
}
