"""Loaded by a vLLM server: `--worker-extension-cls tether_vllm.RunWeights`. It imports nothing of Tether."""

from __future__ import annotations

from typing import Any


class RunWeights:
    """Mixed into vLLM's worker."""

    def reload_run_weights(self, weights_path: str) -> None:
        """Load a folder of safetensors in place of the weights, the output layer included.

        On a CPU, vLLM packs a copy of the output layer's weights. Where they are tied to the embeddings its own
        `reload_weights` leaves the packed copy as it was (0.32).
        """
        worker: Any = self
        worker.reload_weights(weights_path=weights_path)
        for layer in worker.model_runner.model.modules():
            if type(layer).__name__ == "ParallelLMHead":
                layer.quant_method.process_weights_after_loading(layer)
