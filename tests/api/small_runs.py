"""What the tests of the Python API train on."""

SMALL = {
    "model.device": "cpu",
    "rollout.prompts_per_step": 4,
    "rollout.samples_per_prompt": 2,
    "rollout.max_new_tokens": 4,
    "optimizer.policy_lr": 3e-3,
    "optimizer.critic_lr": 3e-3,
}
PROMPTS = ["red:", "green:", "blue:", "gold:", "grey:"]
DEMONSTRATIONS = [{"prompt": f"say {word}", "completion": word} for word in ("red", "green", "blue", "gold")]
PREFERENCES = [{"prompt": f"{word}?", "chosen": "yes!", "rejected": "no."} for word in ("red", "green", "blue", "gold")]


def share_of_letters(prompt: str, completion: str) -> float:
    """How much of an answer is ASCII letters."""
    return sum(letter.isascii() and letter.isalpha() for letter in completion) / max(1, len(completion))
