// Entering. The token of a link stands after #, which browsers send to no one: it is posted, and leaves the address.

/** The token of "#token=...", which is gone from the address and from the history after this; null where there is none. */
export function takeToken() {
  const found = /^#token=(.+)$/.exec(location.hash);
  if (!found) return null;
  history.replaceState(null, "", location.pathname);
  return decodeURIComponent(found[1]);
}

/**
 * Turn a token into a session of this browser. Throws what the server says. A link can come from anyone's page: whoever
 * is logged in already is asked before they become someone else.
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
    if (confirm(`${said.error} Go on as that person?`)) await enter(token, true);
    return; // who they are, or were
  }
  throw new Error(said.error ?? `The server answered ${answer.status}.`);
}

const form = document.getElementById("enter"); // only the page for strangers has it

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
