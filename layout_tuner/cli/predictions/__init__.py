"""Commands of predictions, which need no service: estimate, plan, replay, scenario, calibrate."""
