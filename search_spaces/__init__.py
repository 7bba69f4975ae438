"""The ground floor, which every package stands on.

It has the vocabulary of layouts and campaigns (`spec`, `campaigns`), what is known of them
(`estimates`, `belief`, `statistics`, `tables`), what processes exchange (`protocol`, `trainers`),
and what all of them use (`documents`, `terminal`, `connection`).
"""
