// The frame of the application: the user, the current page, and the keys that work everywhere.

import { get } from "./api.js";
import { closeDialogs } from "./dialogs.js";
import { add, fill, h } from "./dom.js";
import { enter, takeToken } from "./enter.js";
import { bindEverywhere, bindPage, showKeys } from "./keys.js";
import { notice } from "./notices.js";
import { emptyState } from "./parts.js";
import { toggleTheme } from "./theme.js";

const PAGES = [
  { name: "runs", title: "Runs", key: "r", roles: ["owner"] },
  { name: "sweeps", title: "Sweeps", key: "s", roles: ["owner"] },
  { name: "label", title: "Label", key: "l", roles: ["owner", "annotator"] },
  { name: "train", title: "Train", key: "t", roles: ["owner"] },
  { name: "arena", title: "Arena", key: "a", roles: ["owner"] },
  { name: "chat", title: "Chat", key: "c", roles: ["owner"] },
];
// The first part of the address, and the module of its page.
const MODULES = {
  runs: "runs",
  run: "run",
  start: "start",
  sweeps: "sweeps",
  sweep: "sweep",
  label: "label",
  train: "train",
  arena: "arena",
  chat: "chat",
};

const root = document.getElementById("page");
let me = null;
let closers = [];
let opening = 0;

/** "#/run/3/tokens?step=1" as {parts: ["run", "3", "tokens"], query: URLSearchParams}. */
function where() {
  const [path, words = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  return {
    parts: parts.length ? parts : [me.role === "annotator" ? "label" : "runs"],
    query: new URLSearchParams(words),
  };
}

/** A link was opened in a browser that already has a session: use the new one. */
async function changePerson(token) {
  try {
    await enter(token);
    location.reload();
  } catch (error) {
    notice(error.message, "error");
  }
}

async function open() {
  const token = takeToken();
  if (token) {
    await changePerson(token);
    return;
  }
  const mine = ++opening;
  const { parts, query } = where();
  const name = parts[0] === "run" && parts[2] === "tokens" ? "tokens" : MODULES[parts[0]];
  closeDialogs();
  for (const close of closers.splice(0).reverse()) close();
  bindPage([]);
  markNav(parts[0]);
  if (!name) {
    const home = me.role === "annotator" ? "label" : "runs";
    fill(root, emptyState("This address has no page.", h("a", { class: "button main", href: `#/${home}` }, `Open ${home}`)));
    root.dataset.ready = location.hash;
    return;
  }
  const view = { root, parts, query, me, onClose: (close) => closers.push(close), isOpen: () => mine === opening };
  try {
    const page = await import(`./pages/${name}.js`);
    if (mine !== opening) return;
    root.className = `page-${name}`;
    scrollTo(0, 0);
    await page.open(view);
    if (mine === opening) root.dataset.ready = location.hash;
  } catch (error) {
    if (mine === opening && error.name !== "AbortError") showError(error);
  }
}

function showError(error) {
  console.error(error);
  fill(
    root,
    emptyState(
      `This page could not be opened. ${error.message}`,
      h("button", { type: "button", class: "main", onclick: open }, "Try again"),
    ),
  );
}

function markNav(current) {
  const section = { run: "runs", start: "runs", sweep: "sweeps" }[current] ?? current;
  for (const link of document.querySelectorAll("#nav a")) {
    if (link.dataset.name === section) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

/** Load the modules of the other pages in advance, so that opening one only has to load its data. */
function loadOthers() {
  const names = me.role === "owner" ? [...Object.values(MODULES), "tokens"] : ["label"];
  for (const name of names) import(`./pages/${name}.js`).catch(() => {}); // an error is reported when the page is opened
}

async function begin() {
  const token = takeToken();
  if (token) await changePerson(token);
  try {
    me = await get("me");
  } catch (error) {
    showError(error);
    return;
  }
  const pages = PAGES.filter((page) => page.roles.includes(me.role));
  add(
    document.getElementById("nav"),
    pages.map((page) => h("a", { href: `#/${page.name}`, "data-name": page.name }, page.title)),
  );
  document.querySelector(".brand").href = `#/${pages[0].name}`;
  document.getElementById("theme").addEventListener("click", toggleTheme);
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the part after # is the page's address
    root.focus();
  });
  document.getElementById("help").addEventListener("click", showKeys);
  bindEverywhere([
    { key: "?", does: "These keys", run: showKeys },
    { key: "d", does: "Light or dark", run: toggleTheme },
    ...pages.map((page) => ({
      key: `g ${page.key}`,
      does: page.title,
      run: () => {
        location.hash = `#/${page.name}`;
      },
    })),
  ]);
  addEventListener("hashchange", open);
  addEventListener("unhandledrejection", (event) => notice(event.reason?.message ?? "Something went wrong.", "error"));
  await open();
  setTimeout(loadOthers); // after the current page
}

await begin();
