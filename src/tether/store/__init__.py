"""What a run leaves behind: metrics, rollouts with per-token columns, lineage, checkpoints."""
