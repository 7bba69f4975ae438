"""The vocabulary that every room shares: layouts, models, clusters, spaces, rules, estimates."""
