// The metrics of a run as the page has them: asked for in few points, continued by what comes in live.

import { get } from "./api.js";

const POINTS = 600; // more than a chart has pixels across
const MOST_LIVE = 6000; // points a curve may grow by before it is asked for again, thinned by the server

/** The curves of one run: names -> {steps, values, low?, high?}. */
export class RunSeries {
  constructor(run) {
    this.run = run;
    this.series = {};
    this.fresh = 0;
  }

  /** Ask for these metrics, of the whole run or of some steps. */
  async load(names, range = null, signal = undefined) {
    const query = { names: names.join(","), points: POINTS }; // no names: all
    if (range) Object.assign(query, { start: Math.floor(range[0]), end: Math.ceil(range[1]) });
    const { series } = await get(`runs/${this.run.id}/metrics`, query, { signal });
    Object.assign(this.series, series);
    this.fresh = 0;
  }

  /** Take in one live step. Returns whether it is time to ask again. */
  append(step, metrics) {
    for (const [name, value] of Object.entries(metrics)) {
      const line = (this.series[name] ??= { steps: [], values: [] });
      if (line.steps.length && line.steps.at(-1) >= step) continue; // heard of it already
      line.steps.push(step);
      line.values.push(value);
      line.low?.push(value);
      line.high?.push(value);
    }
    this.fresh += 1;
    return this.fresh > MOST_LIVE;
  }

  /** A line for a chart. */
  line(name) {
    const found = this.series[name];
    if (!found) return { label: this.run.name, steps: [], values: [] };
    const banded = found.low?.length === found.steps.length ? { low: found.low, high: found.high } : {};
    return { label: this.run.name, steps: found.steps, values: found.values, ...banded };
  }
}
