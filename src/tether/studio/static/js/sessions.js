// Who is in: the sessions that are open, and putting someone out.

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
    h("p", {}, h("small", {}, "Browsers that are logged in. Whose session is ended can enter again with their link.")),
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

/** What can be done about someone who has a link: make it worthless, or give them another. */
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
    output.textContent = `Give ${person.name} this link. It is shown once, and the one before is worthless: ${made.link}`;
    dispatchEvent(new Event("people-changed"));
  };
  return [
    !person.revoked &&
      button("Revoke", revoke, { kind: "quiet", title: "Make their link worthless and end their sessions; votes stay" }),
    button("New link", renew, { kind: "quiet", title: "Another link; the one before becomes worthless" }),
    output,
  ].filter(Boolean);
}
