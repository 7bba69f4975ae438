"""Which probe gets which devices of an allocation, and when: pure, without a clock of its own."""
