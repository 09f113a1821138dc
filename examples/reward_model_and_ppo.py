"""The three stages of RLHF: SFT, a reward model, PPO against it: `python examples/reward_model_and_ppo.py`."""

import argparse

import tether

TOPICS = ["the sea", "a fox", "winter", "bread", "the moon", "an old clock", "a bridge", "rain"]
DEMONSTRATIONS = [{"prompt": f"Write a line about {topic}.", "completion": f"I love {topic}!"} for topic in TOPICS]
PREFERENCES = [
    {
        "prompt": f"Write a line about {topic}.",
        "chosen": f"I love {topic}!",
        "rejected": f"There is nothing much to say about {topic}.",
    }
    for topic in TOPICS
]


def main() -> None:
    """Train a policy, a judge, and the policy against the judge; then measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a name, a folder or a Hugging Face id")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    sft = tether.sft(options.model, DEMONSTRATIONS, steps=options.steps, settings={"sft.batch_size": 4})
    judge = tether.reward_model(sft, PREFERENCES, steps=options.steps, settings={"reward.batch_size": 4})
    print(judge.metrics[["loss", "accuracy"]])
    prompts = [f"Write a line about {topic}." for topic in TOPICS]
    ppo = tether.ppo(
        sft,
        prompts,
        reward={"judge": judge, "ended": ("ended", 0.5)},
        steps=options.steps,
        settings={"rollout.prompts_per_step": 8, "rollout.max_new_tokens": 24, "roles.critic": "head"},
    )
    report = tether.evaluate(ppo, prompts, judge, against=sft)
    print("reward", report.metrics["score"])
    print("difference", report.differences["score"])
    print("win rate", report.win_rates["reward"].rate)


if __name__ == "__main__":
    main()
