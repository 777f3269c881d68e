"""The rollout service: accepts tasks, schedules sessions, stores what comes of them, and hands out results."""
