"""A simulated cluster, with a model of step times that differs from the closed-form estimates."""
