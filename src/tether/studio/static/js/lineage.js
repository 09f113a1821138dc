// The lineage of a run as a diagram: models and data on the left, the run and its descendants on the right.

import { svg } from "./dom.js";

const [WIDTH, HEIGHT, GAP_X, GAP_Y] = [158, 38, 46, 12];

/** The nodes and arrows around one run: all ancestors and all descendants. */
export function family(runs, chosen) {
  const byName = new Map(runs.map((run) => [run.name, run]));
  const nodes = new Map();
  const arrows = new Map();
  const put = (key, node) => nodes.has(key) || nodes.set(key, { key, ...node });
  const arrow = (from, to, role) => arrows.set(`${from}\n${to}\n${role}`, { from, to, role });

  const upward = (run, seen) => {
    put(`run:${run.name}`, { title: run.name, kind: run.method, run });
    if (seen.has(run.name)) return;
    seen.add(run.name);
    for (const parent of run.lineage ?? []) {
      const source = parent.run && byName.get(parent.run);
      const key = source ? `run:${source.name}` : `source:${parent.source}`;
      if (!source) put(key, { title: shortPath(parent.source), kind: parent.role, run: null });
      arrow(key, `run:${run.name}`, parent.role);
      if (source) upward(source, seen);
    }
  };
  const downward = (run, seen) => {
    if (seen.has(run.name)) return;
    seen.add(run.name);
    for (const child of runs) {
      if (!(child.lineage ?? []).some((parent) => parent.run === run.name)) continue;
      put(`run:${child.name}`, { title: child.name, kind: child.method, run: child });
      for (const parent of child.lineage.filter((each) => each.run === run.name)) {
        arrow(`run:${run.name}`, `run:${child.name}`, parent.role);
      }
      downward(child, seen);
    }
  };
  upward(chosen, new Set());
  downward(chosen, new Set());
  return { nodes: [...nodes.values()], arrows: [...arrows.values()] };
}

function shortPath(source) {
  return source.split("/").filter(Boolean).slice(-2).join("/") || source;
}

/** The column of each node: one to the right of its furthest source. */
export function columns({ nodes, arrows }) {
  const depth = new Map(nodes.map((node) => [node.key, 0]));
  for (let round = 0; round < nodes.length; round++) {
    let moved = false;
    for (const { from, to } of arrows) {
      if (from !== to && depth.get(to) < depth.get(from) + 1 && depth.get(from) + 1 < nodes.length) {
        depth.set(to, depth.get(from) + 1);
        moved = true;
      }
    }
    if (!moved) break;
  }
  for (const { key, run } of nodes) {
    // a model or a file is directly left of the run that used it
    const uses = arrows.filter(({ from }) => from === key).map(({ to }) => depth.get(to));
    if (!run && uses.length) depth.set(key, Math.max(0, Math.min(...uses) - 1));
  }
  return depth;
}

/** The diagram; each run in it is a link. */
export function lineagePicture(runs, chosen) {
  const graph = family(runs, chosen);
  const depth = columns(graph);
  const rows = new Map();
  const place = new Map();
  for (const node of graph.nodes) {
    const column = depth.get(node.key);
    const row = rows.get(column) ?? 0;
    rows.set(column, row + 1);
    place.set(node.key, [column * (WIDTH + GAP_X), row * (HEIGHT + GAP_Y)]);
  }
  const width = Math.max(...[...place.values()].map(([x]) => x)) + WIDTH + 2;
  const height = Math.max(...[...place.values()].map(([, y]) => y)) + HEIGHT + 2;
  const picture = svg("svg", {
    class: "lineage",
    viewBox: `-1 -1 ${width} ${height}`,
    width,
    height,
    role: "img",
    "aria-label": `What ${chosen.name} was made from, and what was made from it`,
  });
  for (const { from, to, role } of graph.arrows) picture.append(drawArrow(place.get(from), place.get(to), role));
  for (const node of graph.nodes) picture.append(drawNode(node, place.get(node.key), node.run?.name === chosen.name));
  return picture;
}

function drawArrow([fromX, fromY], [toX, toY], role) {
  const [x0, y0, x1, y1] = [fromX + WIDTH, fromY + HEIGHT / 2, toX - 5, toY + HEIGHT / 2];
  const bend = Math.max(16, (x1 - x0) / 2);
  return svg(
    "g",
    { class: "arrow" },
    svg("title", {}, role),
    svg("path", { d: `M${x0} ${y0}C${x0 + bend} ${y0} ${x1 - bend} ${y1} ${x1} ${y1}` }),
    svg("path", { class: "head", d: `M${x1 - 3} ${y1 - 3.5}l7 3.5l-7 3.5z` }),
  );
}

function drawNode(node, [x, y], isChosen) {
  const inside = [
    svg("title", {}, node.title),
    svg("rect", { x, y, width: WIDTH, height: HEIGHT, rx: 6 }),
    svg(
      "text",
      { x: x + 10, y: y + 16, class: "title" },
      node.title.length > 21 ? `…${node.title.slice(-20)}` : node.title,
    ),
    svg("text", { x: x + 10, y: y + 30, class: "kind" }, node.run ? `${node.kind}, ${node.run.state}` : node.kind),
  ];
  const kind = `node ${node.run ? "run" : "source"}${isChosen ? " chosen" : ""}`;
  return node.run ? svg("a", { class: kind, href: `#/run/${node.run.id}` }, inside) : svg("g", { class: kind }, inside);
}
