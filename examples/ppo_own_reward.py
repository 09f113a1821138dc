"""PPO on your own prompts with your own reward function: `python examples/ppo_own_reward.py`.

The reward here likes short answers that end by themselves. Replace it, and the prompts, by yours.
"""

import argparse

import tether

PROMPTS = [
    "Why is the sky blue?",
    "What does a compiler do?",
    "How do bees make honey?",
    "What is the capital of France?",
    "Why do we have leap years?",
    "What is a prime number?",
    "How does a refrigerator work?",
    "What causes the tides?",
]


def short_and_whole(completion: str, finish: str) -> float:
    """1 for an answer of at most 20 words that ended by itself, less for longer ones, 0 for one that was cut off."""
    words = len(completion.split())
    return min(1.0, 20 / words) if finish == "stop" and words else 0.0


def show(step: tether.Step) -> None:
    """Print one line a step. A function that returns False here stops the run."""
    print(f"step {step.step + 1} of {step.total}: score {step.metrics['score']:.3f}, {step.seconds_left:.0f} s left")


def main() -> None:
    """Train, then look at what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a name, a folder or a Hugging Face id")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    run = tether.ppo(
        options.model,
        PROMPTS,
        reward=short_and_whole,
        steps=options.steps,
        on_step=show,
        settings={
            "rollout.prompts_per_step": 8,
            "rollout.samples_per_prompt": 2,
            "rollout.max_new_tokens": 48,
            "roles.critic": "head",
        },
    )
    print(run.metrics[["score", "response_length", "kl_ref_k3"]])
    for answer in run.answers()[:3]:
        print(f"{answer.score:.2f}  {answer.prompt}  ->  {answer.text!r}")
    for answer in run.generate("What is a volcano?", n=2):
        print(answer.text)
    print(f"The model is in {run.model_path}.")


if __name__ == "__main__":
    main()
