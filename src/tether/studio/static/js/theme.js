// Light or dark: the system's setting, until the user chooses.

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Switch the theme, store it, and notify everything that draws on a canvas. */
export function toggleTheme() {
  const next = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  localStorage.setItem("theme", next);
  tell();
}

function tell() {
  dispatchEvent(new Event("themechange"));
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);

/** The current value of a CSS variable, for canvases. */
export function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
