// Render every equation that pymdownx.arithmatex marked, with the KaTeX that lies beside this file.
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const text = element.textContent.trim();
    const displayed = text.startsWith("\\[");
    katex.render(text.slice(2, -2), element, { displayMode: displayed, throwOnError: true });
  }
});
