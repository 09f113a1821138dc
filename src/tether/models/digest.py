"""Telling whether two modules hold the same weights."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of every parameter, its name, dtype and shape."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
