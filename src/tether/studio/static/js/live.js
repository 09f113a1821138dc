// Server-sent events. The browser reconnects by itself, and the page's header shows when it does.

const state = document.getElementById("connection");

/** Listen to one run, or to all. `handlers` maps run, step and event to functions; `again` runs after a reconnect. */
export function listen(run, handlers) {
  const source = new EventSource(run === null ? "/api/stream" : `/api/stream?run=${encodeURIComponent(run)}`);
  let lost = false;
  source.addEventListener("open", () => {
    say("live");
    if (lost) handlers.again?.();
    lost = false;
  });
  source.addEventListener("error", () => {
    lost = true;
    say("away");
  });
  for (const kind of ["run", "step", "event"]) {
    source.addEventListener(kind, (message) => handlers[kind]?.(JSON.parse(message.data)));
  }
  return () => {
    source.close();
    say("");
  };
}

function say(word) {
  state.dataset.state = word;
  state.textContent = { live: "live", away: "server away, trying again" }[word] ?? "";
}
