// Log in. The token of a link is after #, which browsers do not send; it is posted and removed from the address.

/** The token in "#token=...", removed from the address and the history; null if there is none. */
export function takeToken() {
  const found = /^#token=(.+)$/.exec(location.hash);
  if (!found) return null;
  history.replaceState(null, "", location.pathname);
  return decodeURIComponent(found[1]);
}

/**
 * Exchange a token for a session. Throws the server's error. A link can come from any page, so a user who is logged in
 * is asked before the browser switches to another person.
 */
export async function enter(token, instead = false) {
  let answer;
  try {
    answer = await fetch("/api/login", {
      method: "POST",
      credentials: "same-origin",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ token, instead }),
    });
  } catch {
    throw new Error("The server does not answer. Is `tether studio` still running?");
  }
  if (answer.ok) return;
  const said = await answer.json().catch(() => ({}));
  if (answer.status === 409 && !instead) {
    if (confirm(`${said.error} Continue as that person?`)) await enter(token, true);
    return; // as the old or the new person
  }
  throw new Error(said.error ?? `The server answered ${answer.status}.`);
}

const form = document.getElementById("enter"); // only the login page has it

async function tryToken(token) {
  const reason = document.getElementById("reason");
  reason.textContent = "Entering.";
  try {
    await enter(token);
    location.replace("/");
  } catch (error) {
    reason.textContent = error.message;
    form.elements.token.focus();
  }
}

function lookForToken() {
  const token = takeToken();
  if (token) tryToken(token);
}

if (form) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const token = form.elements.token.value.trim();
    if (token) tryToken(token);
  });
  addEventListener("hashchange", lookForToken);
  lookForToken();
}
