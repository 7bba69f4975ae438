"""The model: layers of a GPT or Llama, cut for one rank."""
