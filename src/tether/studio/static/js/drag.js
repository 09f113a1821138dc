// Drag the lines of a list with a mouse, a pen or a finger. A finger drags only by the handle: elsewhere it scrolls.

/** Make the <li data-shown> of a list draggable; `dropped(which, onto)` gets the numbers of both lines. */
export function makeDraggable(list, dropped) {
  let held = null;
  let over = null;
  const lineAt = (event) => document.elementFromPoint(event.clientX, event.clientY)?.closest?.("li[data-shown]");
  const mark = (line) => {
    over?.classList.remove("over");
    over = line && line !== held && list.contains(line) ? line : null;
    over?.classList.add("over");
  };
  const release = () => {
    held?.classList.remove("held");
    list.classList.remove("dragging");
    mark(null);
    held = null;
  };

  list.addEventListener("pointerdown", (event) => {
    const line = event.target.closest("li[data-shown]");
    const byHandle = event.target.closest(".handle");
    if (!line || event.button !== 0 || event.target.closest("button")) return;
    if (event.pointerType === "touch" && !byHandle) return;
    held = line;
    list.setPointerCapture(event.pointerId);
  });
  list.addEventListener("pointermove", (event) => {
    if (!held) return;
    held.classList.add("held");
    list.classList.add("dragging");
    mark(lineAt(event));
  });
  list.addEventListener("pointerup", () => {
    const [which, onto] = [held, over];
    release();
    if (which && onto) dropped(Number(which.dataset.shown), Number(onto.dataset.shown));
  });
  list.addEventListener("pointercancel", release);
}
