"""The demo: SFT, preferences, a reward model and PPO on a small model, with the data it needs in `data/`."""
