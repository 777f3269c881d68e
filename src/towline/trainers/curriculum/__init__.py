"""Which task next: pass rates by task and policy version, samplers over them, and budgets."""
