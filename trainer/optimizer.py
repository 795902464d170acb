"""AdamW with decoupled weight decay, linear warm-up, and a bound on the gradient's norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from services.common.errors import InvalidArgument
from trainer.config import OptimizerSpec


class Optimizer:
    """Steps a model's parameters in place.

    Matrices decay, norms and biases (fewer than two dimensions) do not. The learning rate grows linearly over the
    first `warmup_steps` steps, the first step already taking 1/warmup_steps of it, and is constant afterwards.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], spec: OptimizerSpec) -> None:
        trainable = [p for p in parameters if p.requires_grad]
        if not trainable:
            raise InvalidArgument("the policy has no trainable parameter")
        self.spec = spec
        self.steps_done = 0
        self._parameters = trainable
        self._adamw = torch.optim.AdamW(
            [
                {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": spec.weight_decay},
                {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=spec.learning_rate,
            betas=(spec.beta1, spec.beta2),
            fused=True,
        )

    @property
    def learning_rate(self) -> float:
        """What the next step will use."""
        warmup = self.spec.warmup_steps
        return self.spec.learning_rate * min(1.0, (self.steps_done + 1) / warmup if warmup else 1.0)

    def step(self) -> float:
        """Clips, steps and clears the gradients; returns the norm before clipping.

        A norm that is not finite is an error, and nothing is changed: one such step would end the policy.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self.spec.gradient_clip, foreach=True))
        if not math.isfinite(norm):
            self.zero_grad()
            raise FloatingPointError(
                f"the gradient norm at optimizer step {self.steps_done} is {norm}; nothing was changed"
            )
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate
        self._adamw.step()
        self.zero_grad()
        self.steps_done += 1
        return norm

    def zero_grad(self) -> None:
        """Forgets accumulated gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to take the same steps."""
        return {"steps_done": self.steps_done, "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned."""
        self.steps_done = int(state["steps_done"])
        self._adamw.load_state_dict(state["adamw"])
