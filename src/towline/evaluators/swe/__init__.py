"""Published software-engineering data sets: what their images must not show to an agent, and how they grade."""
