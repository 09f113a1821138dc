// A very small curve.

import { svg } from "./dom.js";

/** An SVG line through the numbers; null if there are fewer than two. */
export function sparkline(values, { width = 96, height = 22, label = "" } = {}) {
  const known = values.filter((value) => value !== null && Number.isFinite(value));
  const box = svg("svg", {
    class: "spark",
    viewBox: `0 0 ${width} ${height}`,
    width,
    height,
    role: "img",
    "aria-label": label,
  });
  if (known.length < 2) return box;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const x = (place) => 2 + (place / (values.length - 1)) * (width - 6);
  const y = (value) => height - 3 - ((value - low) / (high - low || 1)) * (height - 6);
  let path = "";
  let pen = "M";
  values.forEach((value, place) => {
    if (value === null || !Number.isFinite(value)) {
      pen = "M";
      return;
    }
    path += `${pen}${x(place).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  });
  const last = values.findLastIndex((value) => value !== null && Number.isFinite(value));
  box.append(svg("path", { d: path }), svg("circle", { cx: x(last), cy: y(values[last]), r: 2 }));
  return box;
}
