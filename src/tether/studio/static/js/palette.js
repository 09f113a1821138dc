// Numbers as colours: blue below the middle, orange above it. Both can be told apart with any colour blindness,
// and there are few enough shades to define them in the style sheets for both themes.

export const SHADES = 8; // on either side; classes n8 ... n1, z, p1 ... p8

/** The quantities to show. `middle` has no colour; `of` converts the column's number to the coloured one. */
export const QUANTITIES = {
  advantage: { title: "Advantage", middle: 0, says: ["less of this", "more of this"] },
  value: { title: "Value", middle: 0, says: ["expects little", "expects much"] },
  kl: { title: "KL to the reference", middle: 0, says: ["rarer than before", "likelier than before"] },
  reward: { title: "Reward", middle: 0, says: ["punished", "rewarded"] },
  return: { title: "Return", middle: 0, says: ["low", "high"] },
  ratio: {
    title: "Ratio",
    middle: 1,
    says: ["made rarer", "made likelier"],
    of: (ratio) => (ratio > 0 ? Math.log(ratio) : null),
    from: 0,
  },
  entropy: { title: "Entropy", middle: 0, says: ["", "undecided"] },
  old_logprob: { title: "Log-prob", middle: 0, says: ["", "surprising"], of: (value) => -value, from: 0 },
  behavior_logprob: {
    title: "Log-prob as sampled",
    middle: 0,
    says: ["", "surprising"],
    of: (value) => -value,
    from: 0,
  },
  ref_logprob: { title: "Log-prob, reference", middle: 0, says: ["", "surprising"], of: (value) => -value, from: 0 },
};

export const COLUMN_TITLES = {
  behavior_logprob: "log-prob, sampled",
  untruncated_logprob: "log-prob, untruncated",
  old_logprob: "log-prob, old",
  ref_logprob: "log-prob, reference",
  kl: "KL",
  value: "value",
  reward: "reward",
  advantage: "advantage",
  return: "return",
  ratio: "ratio",
  clipped: "clipped",
  entropy: "entropy",
};

/** The coloured numbers of one column; null off the answer and for missing values. */
export function coloured(rollout, name) {
  const column = rollout.columns[name] ?? [];
  const turn = QUANTITIES[name]?.of ?? ((value) => value);
  return rollout.pieces.map((_, place) => {
    const value = column[place];
    return rollout.response[place] && value !== null && value !== undefined ? turn(Number(value)) : null;
  });
}

/** The value of full colour: large, but not determined by the single largest token. */
export function reach(values) {
  const sizes = values
    .filter((value) => value !== null && Number.isFinite(value))
    .map(Math.abs)
    .sort((a, b) => a - b);
  if (!sizes.length) return 1;
  return sizes[Math.ceil(0.98 * (sizes.length - 1))] || sizes.at(-1) || 1;
}

/** The class of a number: p3 is the third orange shade, z is no colour. */
export function shade(value, full) {
  if (value === null || !Number.isFinite(value)) return "z";
  const step = Math.min(SHADES, Math.round((Math.abs(value) / full) * SHADES));
  return step === 0 ? "z" : (value > 0 ? "p" : "n") + step;
}
