"""Parts of a plan: shares of a step, probes that a budget buys, and two layouts compared."""
