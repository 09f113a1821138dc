// The metrics of a run on the page: loaded with few points, extended by live steps.

import { get } from "./api.js";

const POINTS = 600; // more than the pixels of a chart's width
const MAX_LIVE = 6000; // live points of a curve before it is loaded again, thinned by the server

/** The curves of one run: names -> {steps, values, low?, high?}. */
export class RunSeries {
  constructor(run) {
    this.run = run;
    this.series = {};
    this.fresh = 0;
  }

  /** Load these metrics, for the whole run or for some steps. */
  async load(names, range = null, signal = undefined) {
    const query = { names: names.join(","), points: POINTS }; // no names: all
    if (range) Object.assign(query, { start: Math.floor(range[0]), end: Math.ceil(range[1]) });
    const { series } = await get(`runs/${this.run.id}/metrics`, query, { signal });
    Object.assign(this.series, series);
    this.fresh = 0;
  }

  /** Add one live step. Returns whether the curves should be loaded again. */
  append(step, metrics) {
    for (const [name, value] of Object.entries(metrics)) {
      const line = (this.series[name] ??= { steps: [], values: [] });
      if (line.steps.length && line.steps.at(-1) >= step) continue; // already received
      line.steps.push(step);
      line.values.push(value);
      line.low?.push(value);
      line.high?.push(value);
    }
    this.fresh += 1;
    return this.fresh > MAX_LIVE;
  }

  /** A line for a chart. */
  line(name) {
    const found = this.series[name];
    if (!found) return { label: this.run.name, steps: [], values: [] };
    const banded = found.low?.length === found.steps.length ? { low: found.low, high: found.high } : {};
    return { label: this.run.name, steps: found.steps, values: found.values, ...banded };
  }
}
