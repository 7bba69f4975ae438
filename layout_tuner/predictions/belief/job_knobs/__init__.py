"""What is believed of job knobs: their factors on terms of the step, and their memory."""
