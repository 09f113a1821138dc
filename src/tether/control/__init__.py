"""PPO and TRPO on gymnasium's environments, with the learner, objectives and formulas of the language models."""
