"""Shapes of models, as trainers write them."""
