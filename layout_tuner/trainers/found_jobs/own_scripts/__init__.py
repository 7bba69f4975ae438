"""Users' own scripts with DeepSpeed, Accelerate or Trainer, and what we export for them."""
