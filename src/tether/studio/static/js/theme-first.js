// Runs before the first paint, so that a page opened in the chosen theme never flashes the other one.
(() => {
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
