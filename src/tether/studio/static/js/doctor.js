// What the doctor says of a run, each finding beside the curve that it speaks of.

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
        ? `${found} ${found === 1 ? "finding" : "findings"}, shown beside the curve ${found === 1 ? "it speaks" : "they speak"} of`
        : "nothing is wrong that it knows of",
      h(
        "details",
        {},
        h("summary", {}, `${heard.healthy.length} healthy, ${heard.too_little.length} with too little to go by`),
        listed(heard.healthy, "saw"),
        listed(heard.too_little, "lacks"),
      ),
    ),
    elsewhere.map(findingCard),
  );
}
