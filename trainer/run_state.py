"""Where a run stands: what a checkpoint must hold beside weights, optimizer and random numbers.

This module knows no service, no model and no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.common.errors import InvalidArgument
from trainer.accounting import Admission, Final, Ledger
from trainer.admission import Credits
from trainer.config import JobSpec
from trainer.prompts import PromptSampler
from trainer.records import Progress


class RunState:
    """Steps, versions, accounts and what is in flight.

    `admitted_at` holds, for everything in flight in admission order, the steps done at its admission (after a resume:
    at its re-admission). `resampled` names what was re-admitted: its noise must be new, because the value prior may
    have learnt from its first rollouts.
    """

    def __init__(self, spec: JobSpec, order: Sequence[str], *, lineage: int) -> None:
        self._spec = spec
        self._order = order
        self.credits = Credits(spec.prompts_per_step, spec.max_staleness, spec.steps)
        self.lineage = lineage
        self.ledger = Ledger()
        self.admitted_at: dict[Admission, int] = {}
        self.resampled: set[Admission] = set()
        self.steps_done = 0
        self.steps_admitted = 0
        self.policy_version = 0
        self.empty_in_a_row = 0

    @property
    def progress(self) -> Progress:
        """As people see it."""
        return Progress(
            step=self.steps_done,
            steps=self._spec.steps,
            **self.ledger.counts(),
            rollouts=self.ledger.rollouts,
            policy_version=self.policy_version,
            lineage=self.lineage,
        )

    def admit(self) -> list[Admission]:
        """Admits all prompts that the credits allow now, and returns them."""
        new: list[Admission] = []
        steps = self.credits.admissible_steps(steps_done=self.steps_done, steps_admitted=self.steps_admitted)
        for step in steps:
            new.extend(admissions_of(step, self._spec, self._order))
            self.steps_admitted = step + 1
        for admission in new:
            self.ledger.admit(admission)
            self.admitted_at[admission] = self.steps_done
        return new

    def settle(self, admission: Admission, final: Final, *, rollouts: int) -> None:
        """Ends one admission."""
        self.ledger.settle(admission, final, rollouts=rollouts)
        del self.admitted_at[admission]
        self.resampled.discard(admission)

    def state(self) -> dict[str, Any]:
        """Plain JSON for the checkpoint."""
        return {
            "ledger": self.ledger.state(),
            "steps_done": self.steps_done,
            "steps_admitted": self.steps_admitted,
            "policy_version": self.policy_version,
            "lineage": self.lineage,
            "empty_in_a_row": self.empty_in_a_row,
            "seed": self._spec.seed,
        }

    def take_up(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint: everything in flight there counts as re-admitted now.

        Raises InvalidArgument or FailedPrecondition on a damaged state.
        """
        self.ledger = Ledger.from_state(state["ledger"])
        try:
            self.steps_done = int(state["steps_done"])
            self.steps_admitted = int(state["steps_admitted"])
            self.policy_version = int(state["policy_version"])
            self.empty_in_a_row = int(state["empty_in_a_row"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(f"the checkpoint's state is damaged: {error!r}") from error
        self.admitted_at = dict.fromkeys(self.ledger.in_flight, self.steps_done)
        self.resampled = set(self.ledger.in_flight)


def admissions_of(step: int, spec: JobSpec, order: Sequence[str]) -> list[Admission]:
    """The prompts of a step: places step x B to (step + 1) x B - 1 of the order that the seed draws.

    A data set smaller than a step gives a prompt more than once; `attempt` tells them apart.
    """
    sampler = PromptSampler(len(order), spec.seed)
    times: dict[str, int] = {}
    admissions = []
    for position in range(step * spec.prompts_per_step, (step + 1) * spec.prompts_per_step):
        prompt_id = order[sampler.at(position)]
        admissions.append(Admission(step, prompt_id, times.get(prompt_id, 0)))
        times[prompt_id] = times.get(prompt_id, 0) + 1
    return admissions
