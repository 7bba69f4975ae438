"""The model: its shape, and presets."""
