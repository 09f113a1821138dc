"""`takes: text`: one answer a call, with the record's columns by name. docs/rewards.md runs this file."""


def right(prompt, completion, answer):
    return float(answer in completion.split())


def weighted(completion, answer, difficulty, **columns):  # columns holds id, messages, finish and the record's others
    return float(answer in completion) * difficulty


async def judged(prompt, completion):  # up to 32 answers are awaited at the same time
    import asyncio

    await asyncio.sleep(0.01)  # ask a server here
    return float(len(completion) < 80)
