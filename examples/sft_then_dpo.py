"""Demonstrations first, then preferences without a reward model: `python examples/sft_then_dpo.py`."""

import argparse

import tether

DEMONSTRATIONS = [
    {"prompt": "What is the capital of France?", "completion": "Paris."},
    {"prompt": "What is 2 + 2?", "completion": "4."},
    {"prompt": "Which planet is the largest?", "completion": "Jupiter."},
    {"prompt": "Who wrote Hamlet?", "completion": "William Shakespeare."},
]
PREFERENCES = [
    {
        "prompt": "What is the capital of Italy?",
        "chosen": "Rome.",
        "rejected": "That is a great question! Italy's capital is the wonderful city of Rome.",
    },
    {
        "prompt": "How many legs has a spider?",
        "chosen": "Eight.",
        "rejected": "Spiders are fascinating creatures, and they have eight legs in total.",
    },
]


def main() -> None:
    """Train twice; compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a name, a folder or a Hugging Face id")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    sft = tether.sft(options.model, DEMONSTRATIONS, steps=options.steps, settings={"sft.batch_size": 4})
    dpo = tether.dpo(sft, PREFERENCES, steps=options.steps, settings={"dpo.batch_size": 2})
    print(dpo.metrics[["loss", "accuracy"]])
    question = "What is the capital of Spain?"
    for run in (sft, dpo):
        print(run.method, run.generate(question, temperature=0.0, max_new_tokens=32)[0].text)
    print(f"The model is in {dpo.save('concise-model')}.")


if __name__ == "__main__":
    main()
