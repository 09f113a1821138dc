"""Settings of the processes that sample for a run."""

from __future__ import annotations

from pydantic import Field, field_validator

from tether.config.base import Count, NonNegative, PositiveFloat, Settings, check_url


class WorkerSettings(Settings):
    """Rollout workers."""

    workers: Count = Field(
        default=0, description="Sampler processes to start on this machine; 0: the training process samples."
    )
    servers: tuple[str, ...] = Field(
        default=(), description="URLs of rollout workers (`tether worker`), or of vLLM servers for engine vllm."
    )
    token_env: str = Field(
        default="TETHER_WORKER_TOKEN", description="Environment variable that holds the bearer token of the servers."
    )
    weights_dir: str | None = Field(
        default=None,
        description="Folder for weights on their way to workers; vLLM servers must see it under the same path. null: "
        "shared memory, or the folder for temporary files.",
    )
    hedge_seconds: NonNegative = Field(
        default=60.0, description="Give a chunk to a second worker after this long; 0: never."
    )
    worker_timeout: PositiveFloat = Field(
        default=1800.0, description="A worker that needs longer for one chunk is taken for lost, in seconds."
    )
    worker_patience: PositiveFloat = Field(
        default=60.0, description="Stop (exit 8) when no worker is left for this long, in seconds."
    )

    @field_validator("servers")
    @classmethod
    def _urls(cls, servers: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(servers)) < len(servers):
            raise ValueError("servers names a URL twice: a worker has one place in the pool")
        return tuple(check_url("servers", url) for url in servers)

    @property
    def samples_elsewhere(self) -> bool:
        """Whether other processes sample."""
        return bool(self.workers or self.servers)
