"""The model: one rank's part of a GPT or Llama, with tensor, context and expert parallelism."""
