"""`takes: rollouts`: all answers of a step; those to one prompt share a group_id. docs/rewards.md runs this file."""


def longest_of_its_group(rollouts):
    longest = {}
    for rollout in rollouts:
        longest[rollout.group_id] = max(longest.get(rollout.group_id, 0), len(rollout.completion))
    return [float(len(rollout.completion) == longest[rollout.group_id]) for rollout in rollouts]
