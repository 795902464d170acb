"""Credits: how far generation may run ahead of training, and which finished groups make the next step.

Invariant: no group is trained more than `max_staleness` steps after the one whose weights it was admitted under.
It is kept here, when prompts are admitted and batches chosen, not by throwing finished work away:

- at most (max_staleness + 1) x prompts_per_step prompts are admitted beyond those whose step is done;
- a step takes the oldest finished groups, but waits for slower ones where leaving them to a later step would make
  some group too old (earliest deadline first; a group admitted at step v must be trained by step v + max_staleness).

Filtered and dropped groups fill their place in a step like trained ones, so prompts that are lost never use up
capacity. This module knows no service and no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from services.common.errors import InvalidArgument
from trainer.accounting import Admission


@dataclass(frozen=True)
class Credits:
    """The bound. `steps` is the length of the job: nothing is admitted past it."""

    prompts_per_step: int
    max_staleness: int
    steps: int

    def __post_init__(self) -> None:
        if self.prompts_per_step < 1 or self.max_staleness < 0 or self.steps < 0:
            raise InvalidArgument(f"no such credits: {self}")

    def admissible_steps(self, *, steps_done: int, steps_admitted: int) -> range:
        """Steps whose prompts may be admitted now.

        `steps_done` counts finished steps, `steps_admitted` those whose prompts were admitted; both come from the
        checkpoint after a resume, so the bound holds there from the first step on.
        """
        return range(steps_admitted, min(steps_done + self.max_staleness + 1, self.steps))

    def choose(
        self, *, step: int, admitted_at: Mapping[Admission, int], ready: Collection[Admission]
    ) -> list[Admission] | None:
        """The groups of `step`, oldest first, or None when it has to wait for more.

        `admitted_at` gives, for everything in flight and in admission order, the number of steps done at its
        admission (at its re-admission, after a resume); `ready` are those whose group has arrived.
        """
        wanted = min(self.prompts_per_step, len(admitted_at))
        order = sorted(admitted_at, key=lambda admission: admitted_at[admission])  # stable: admission order within
        chosen = [admission for admission in order if admission in ready][:wanted]
        if len(chosen) < wanted:
            return None
        # Oldest first takes as many as possible of every age, so if this choice leaves too much, every choice does.
        for last in range(step, step + self.max_staleness + 1):
            due = sum(at + self.max_staleness <= last for at in admitted_at.values())
            taken = sum(admitted_at[admission] + self.max_staleness <= last for admission in chosen)
            if due - taken > (last - step) * self.prompts_per_step:
                return None
        return chosen
