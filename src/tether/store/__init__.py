"""The records of a run: metrics, rollouts with per-token columns, lineage, checkpoints."""
