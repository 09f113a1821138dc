// Stop, resume and fork a run.

import { post } from "./api.js";
import { ask } from "./dialogs.js";
import { button, field, h } from "./dom.js";
import { notice, tried } from "./notices.js";

/** The buttons for the run's current state. */
export function runActions(run) {
  const box = h("span", { class: "row" });
  if (run.state === "running") box.append(button("Stop", () => act(run, "stop", `${run.name} stops after this step`)));
  if (["stopped", "interrupted", "failed"].includes(run.state)) {
    box.append(button("Resume", () => act(run, "resume", `${run.name} is resumed`)));
  }
  if (run.step > 0) box.append(button("Fork", () => askFork(run)));
  return box;
}

async function act(run, action, words) {
  if (await tried(() => post(`runs/${run.id}/${action}`))) notice(words);
}

function askFork(run) {
  const step = h("input", { type: "number", min: 0, max: run.step, value: run.step, required: true });
  const settings = h("textarea", { rows: 4, class: "mono", placeholder: "kl.coef: 0.1" });
  const send = async () => {
    const made = await tried(() =>
      post(`runs/${run.id}/fork`, { step: Number(step.value), settings: parseSettings(settings.value) }),
    );
    if (!made) return false;
    notice(`${made.name ?? "The fork"} has started`);
    location.hash = "#/runs";
    return true;
  };
  ask(
    { title: `Fork ${run.name}`, action: "Fork", send, first: step },
    field("From step", step),
    field("Settings to change", settings, "One per line, as in a recipe: key: value"),
  );
}

/** "a.b: 1" lines as {"a.b": 1}; a value that is not JSON is a text. */
export function parseSettings(text) {
  const found = {};
  for (const line of text
    .split("\n")
    .map((each) => each.trim())
    .filter(Boolean)) {
    const place = line.indexOf(":");
    if (place < 1) throw new Error(`"${line}" is not of the form key: value`);
    found[line.slice(0, place).trim()] = plain(line.slice(place + 1).trim());
  }
  return found;
}

/** A value from a form: a number, true, false, null, a list, or a text. */
export function plain(word) {
  try {
    return JSON.parse(word);
  } catch {
    return word !== "" && !Number.isNaN(Number(word)) ? Number(word) : word;
  }
}
