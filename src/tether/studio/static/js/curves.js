// The curves to show, grouped by the question that they answer.

const QUESTIONS = [
  [
    "Is it learning?",
    [
      ["score", "Score", "what the policy is trained on, mean over the step's answers"],
      ["held_out/score", "Held-out score", "on prompts that are never trained on"],
      ["accuracy", "Accuracy", "share of pairs ranked as in the data"],
      ["held_out/accuracy", "Held-out accuracy", "on pairs that are never trained on"],
      ["score_std", "Spread of scores", "standard deviation; at zero there is nothing to learn"],
      ["loss", "Loss", "mean over the step"],
      ["policy_loss", "Policy loss", "mean over the step"],
      ["reward/", "Part of the score", "before its weight"],
    ],
  ],
  [
    "Is it still near the start?",
    [
      ["kl_ref_k3", "KL to the reference", "nats per answer"],
      ["kl_coef", "KL coefficient", "weight of the KL penalty"],
      ["entropy", "Entropy", "nats per token; a fall to zero is mode collapse"],
      ["response_length", "Length of answers", "tokens"],
      ["truncated", "Answers cut off", "share that reached the length limit"],
      ["answers/top_share", "Most common answer", "share of answers that are the same"],
    ],
  ],
  [
    "Is the critic accurate?",
    [
      ["explained_variance", "Explained variance", "1 is a perfect critic, 0 predicts nothing"],
      ["value_loss", "Value loss", ""],
      ["value", "Value", "what the critic expects"],
      ["grad_norm/critic", "Gradient of the critic", "norm"],
    ],
  ],
  [
    "Do sampler and trainer agree?",
    [
      ["logprob_diff", "Sampler gap", "mean difference of sampler and trainer log-probs"],
      ["logprob_diff_max", "Largest sampler gap", "of any token"],
      ["truncation_gap", "Truncation gap", "log-prob that top-p and top-k removed"],
      ["first_approx_kl", "KL before the update", "should be zero"],
    ],
  ],
  [
    "Are updates small enough?",
    [
      ["approx_kl", "KL to the sampler", "nats per token that one update moves the policy"],
      ["clip_fraction", "Clip fraction", "share of tokens whose ratio was clipped"],
      ["grad_norm/policy", "Gradient of the policy", "norm"],
      ["advantage_std", "Spread of advantages", ""],
      ["advantage_top_share", "Advantage in one answer", "largest share"],
      ["skipped_steps", "Skipped updates", ""],
    ],
  ],
  [
    "Where does the time go?",
    [
      ["seconds/", "Seconds", ""],
      ["tokens_per_second", "Tokens per second", ""],
    ],
  ],
];

/** [{question, charts: [{name, title, note}]}] for the recorded metrics; all others come last, collapsed. */
export function questionsFor(names) {
  const left = new Set(names);
  const groups = [];
  for (const [question, curves] of QUESTIONS) {
    const charts = [];
    for (const [pattern, title, note] of curves) {
      const fitting = pattern.endsWith("/") ? names.filter((name) => name.startsWith(pattern)) : [pattern];
      for (const name of fitting) {
        if (!left.delete(name)) continue;
        const part = pattern.endsWith("/") ? name.slice(pattern.length) : "";
        charts.push({ name, title: part ? `${title}: ${part}` : title, note });
      }
    }
    if (charts.length) groups.push({ question, charts, closed: false });
  }
  left.delete("step");
  if (left.size) {
    const charts = [...left].sort().map((name) => ({ name, title: name, note: "" }));
    groups.push({ question: "Everything else", charts, closed: true });
  }
  return groups;
}

/** Exponential moving average with bias correction: s_t = w s_{t-1} + (1 - w) x_t, divided by 1 - w^t. */
export function smooth(values, weight) {
  if (!weight) return values;
  let [sum, mass] = [0, 0];
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

/** A chart as one line of numbers, for screen readers. */
export function inWords(title, steps, values, number) {
  const kept = values
    .map((value, place) => [steps[place], value])
    .filter(([, value]) => value !== null && Number.isFinite(value));
  if (!kept.length) return `${title}: no data yet`;
  const only = kept.map(([, value]) => value);
  const [low, high] = only.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  return (
    `${title}: ${number(only[0])} at step ${kept[0][0]}, ${number(only.at(-1))} at step ${kept.at(-1)[0]}, ` +
    `between ${number(low)} and ${number(high)}`
  );
}
