// The tasks of an item: choose one of two, rank, or write an answer.

import { makeDraggable } from "./drag.js";
import { cutMark, textBox } from "./answer_text.js";
import { button, fill, h } from "./dom.js";

/** Two answers side by side; one key decides. A click on an answer does too, unless it selects text. */
export function pairTask(item, cast) {
  const side = (which, name, key) =>
    h(
      "article",
      {
        class: "side",
        "data-side": name,
        onclick: () => getSelection()?.isCollapsed !== false && cast(name),
      },
      h(
        "span",
        { class: "side-key" },
        button(`The ${name} one`, (event) => {
          event.stopPropagation();
          cast(name);
        }, { key }),
        cutMark(item.answers[which]),
      ),
      textBox(item.answers[which].text),
      item.ratings?.[which]?.box,
    );
  const box = h(
    "div",
    { class: "pair-task" },
    h("div", { class: "sides" }, side(0, "left", "←"), side(1, "right", "→")),
    h(
      "div",
      { class: "row choices" },
      button("Tie", () => cast("tie"), { key: "t" }),
      button("Both bad", () => cast("both_bad"), { key: "b" }),
      button("Skip", () => cast("skip"), { key: "s" }),
    ),
  );
  const keys = [
    { key: ["ArrowLeft", "1"], does: "The left one is better", run: () => cast("left") },
    { key: ["ArrowRight", "2"], does: "The right one is better", run: () => cast("right") },
    { key: "t", does: "Tie", run: () => cast("tie") },
    { key: "b", does: "Both are bad", run: () => cast("both_bad") },
    { key: "s", does: "Skip", run: () => cast("skip") },
  ];
  return { box, keys };
}

/** Up to nine answers, best first: a digit picks the next best, = ties it with the previous one, or drag them. */
export function rankingTask(item, cast) {
  const many = item.answers.length;
  let ranked = []; // places in the shown order, best first
  const tied = new Set(); // those that tie with the previous one
  const list = h("ol", { class: "ranking" });
  const submit = button("Save this order", () => send(), { key: "Enter", kind: "main" });
  const hint = h("small", { role: "status" });
  makeDraggable(list, (which, onto) => drop(which, onto));

  const send = () => ranked.length === many && cast(groups());
  const groups = () => {
    const found = [];
    for (const shown of ranked) {
      if (tied.has(shown) && found.length) found.at(-1).push(shown);
      else found.push([shown]);
    }
    return found.map((group) => (group.length === 1 ? group[0] : group));
  };
  const tie = (shown) => {
    if (ranked.indexOf(shown) < 1) return;
    if (!tied.delete(shown)) tied.add(shown);
    draw();
  };
  const pick = (shown) => {
    if (shown >= many || ranked.includes(shown)) return;
    ranked.push(shown);
    if (ranked.length === many - 1) ranked = sequence(); // the remaining one is the last
    draw();
  };
  const clear = () => {
    ranked = [];
    tied.clear();
    draw();
  };
  const drop = (which, onto) => {
    const all = sequence();
    const place = all.indexOf(onto);
    all.splice(all.indexOf(which), 1);
    all.splice(place, 0, which);
    ranked = all;
    tied.delete(which); // its position has changed
    draw();
  };
  const sequence = () => [
    ...ranked,
    ...item.answers.map((_, shown) => shown).filter((shown) => !ranked.includes(shown)),
  ];

  const texts = item.answers.map((answer) => textBox(answer.text));

  function draw() {
    let rank = -1;
    fill(
      list,
      sequence().map((shown, place) => {
        const isRanked = ranked.includes(shown);
        const isTied = isRanked && place > 0 && tied.has(shown);
        if (isRanked && !isTied) rank += 1;
        return h(
          "li",
          { class: `${isRanked ? "ranked" : ""} ${isTied ? "tied" : ""}`, "data-shown": shown },
          h(
            "span",
            { class: "rank" },
            h(
              "button",
              {
                type: "button",
                class: "quiet",
                "aria-label": `Answer ${shown + 1}, ${isRanked ? `rank ${rank + 1}${isTied ? ", tied" : ""}` : "not ranked"}`,
                onclick: () => pick(shown),
              },
              h("kbd", {}, shown + 1),
              h("b", {}, isRanked ? `#${rank + 1}` : "–"),
            ),
            isRanked &&
              place > 0 &&
              h(
                "button",
                {
                  type: "button",
                  class: "tie",
                  "aria-pressed": String(isTied),
                  "aria-label": `Answer ${shown + 1} ties with the one above`,
                  title: "Ties with the one above",
                  onclick: () => tie(shown),
                },
                "=",
              ),
          ),
          h("div", { class: "ranked-text" }, cutMark(item.answers[shown]), texts[shown], item.ratings?.[shown]?.box),
          h("span", { class: "handle", "aria-hidden": "true" }, "⠿"),
        );
      }),
    );
    submit.disabled = ranked.length !== many;
    hint.textContent = submit.disabled
      ? `Press the number of the best answer that is left (${ranked.length} of ${many} placed), or drag.`
      : "In order. Save it, or start over.";
  }
  draw();
  const box = h(
    "div",
    { class: "stack" },
    hint,
    list,
    h(
      "div",
      { class: "row choices" },
      submit,
      button("Start over", clear, { key: "c" }),
      button("Skip", () => cast("skip"), { key: "s" }),
    ),
  );
  const keys = [
    {
      key: item.answers.map((_, shown) => String(shown + 1)),
      does: "Next best answer",
      run: (event) => pick(Number(event.key) - 1),
    },
    { key: "=", does: "The last placed ties with the one before", run: () => tie(ranked.at(-1)) },
    { key: "Enter", does: "Save this order", run: send },
    { key: ["c", "Backspace"], does: "Start over", run: clear },
    { key: "s", does: "Skip", run: () => cast("skip") },
  ];
  return { box, keys };
}

/** A prompt to answer. The answer may be the word "skip", so skipping is sent differently. */
export function demonstrationTask(item, cast) {
  const text = h("textarea", {
    rows: 10,
    "aria-label": "Your answer",
    placeholder: "Write the answer you would want to be given.",
    onkeydown: (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        send();
      }
    },
  });
  const send = () => text.value.trim() && cast(text.value);
  const box = h(
    "div",
    { class: "stack" },
    text,
    h(
      "div",
      { class: "row choices" },
      button("Save", send, { key: "Ctrl Enter", kind: "main" }),
      button("Skip", () => cast({ skip: true }), { key: "s" }),
    ),
  );
  const keys = [
    { key: "e", does: "Write", run: () => text.focus() },
    { key: "s", does: "Skip", run: () => cast({ skip: true }) },
    { key: "Ctrl+Enter", does: "Save (while writing)", run: send },
  ];
  return { box, keys, begin: () => text.focus() };
}
