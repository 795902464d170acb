"""The trainer: turns scored groups into gradients. It never calls the verifier and never picks a rollout."""
