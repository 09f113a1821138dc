// The doctor's findings about a run, each under the curve that it is about.

import { get } from "./api.js";
import { fill, h } from "./dom.js";
import { tried } from "./notices.js";
import { findingCard } from "./parts.js";

export async function hearDoctor(page) {
  const heard = await tried(() => get(`runs/${page.run.id}/findings`));
  if (!heard || !page.view.isOpen()) return;
  for (const chart of page.charts)
    fill(chart.beside, heard.findings.filter((each) => each.metric === chart.name).map(findingCard));
  const drawn = new Set(page.charts.map((chart) => chart.name));
  const elsewhere = heard.findings.filter((each) => !drawn.has(each.metric));
  const listed = (list, key) =>
    h(
      "ul",
      {},
      list.map((each) => h("li", {}, h("b", {}, each.audit.replaceAll("-", " ")), ": ", each[key])),
    );
  const found = heard.findings.length;
  fill(
    page.doctor,
    h(
      "p",
      { class: "verdict" },
      h("b", {}, "Doctor: "),
      found
        ? `${found} ${found === 1 ? "finding" : "findings"}, shown under the curve ${found === 1 ? "it is" : "they are"} about`
        : heard.healthy.length
          ? "no findings"
          : "too little data yet",
      h(
        "details",
        {},
        h("summary", {}, `${heard.healthy.length} checks passed, ${heard.too_little.length} need more data`),
        listed(heard.healthy, "saw"),
        listed(heard.too_little, "lacks"),
      ),
    ),
    elsewhere.map(findingCard),
  );
}
