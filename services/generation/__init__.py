"""Generation: samples rollouts from the current policy, token ids in and out."""
