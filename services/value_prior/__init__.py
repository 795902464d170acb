"""Value prior: predicts how likely a policy is to solve a prompt, before any rollout."""
