// The open sessions, and ending them.

import { get, post } from "./api.js";
import { button, fill, h } from "./dom.js";
import { age } from "./format.js";
import { tried } from "./notices.js";

/** The open sessions, each with a button that ends it. */
export function sessionTools() {
  const list = h("ul", { class: "sessions" });
  const draw = async () => {
    const found = await tried(() => get("sessions"));
    if (found) fill(list, found.sessions.map((session) => sessionLine(session, draw)));
  };
  draw();
  addEventListener("people-changed", draw);
  const section = h(
    "section",
    { class: "question" },
    h("h2", {}, "Sessions"),
    h("p", {}, h("small", {}, "Browsers that are logged in. After you end a session, the person can log in again with their link.")),
    list,
  );
  return { section, close: () => removeEventListener("people-changed", draw) };
}

function sessionLine(session, draw) {
  const end = async () => {
    if (!(await tried(() => post(`sessions/${session.id}/end`)))) return;
    if (session.this) location.reload();
    else draw();
  };
  const seen = session.this ? "this browser" : `used ${age(session.seen)} ago`;
  return h(
    "li",
    {},
    h("b", {}, session.name),
    h("small", {}, [session.role, seen, session.address, session.browser].filter(Boolean).join(", ")),
    button(session.this ? "Log out" : "End", end, { kind: "quiet", title: "End this session" }),
  );
}

/** The actions for a person with a link: revoke it, or create a new one. */
export function linkButtons(person, changed) {
  if (!person.invited) return [];
  const output = h("output", { class: "mono" });
  const revoke = async () => {
    const made = await tried(() => post(`raters/${person.id}/revoke`));
    if (made) changed({ ...person, enters: false, revoked: true });
    dispatchEvent(new Event("people-changed"));
  };
  const renew = async () => {
    const made = await tried(() => post(`raters/${person.id}/link`));
    if (!made) return;
    output.textContent = `Give ${person.name} this link. It is shown once, and the old link no longer works: ${made.link}`;
    dispatchEvent(new Event("people-changed"));
  };
  return [
    !person.revoked &&
      button("Revoke", revoke, { kind: "quiet", title: "Revoke their link and end their sessions; votes stay" }),
    button("New link", renew, { kind: "quiet", title: "Create a new link; the old one stops working" }),
    output,
  ].filter(Boolean);
}
